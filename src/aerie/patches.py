"""The patches in this image's vLLM, as the image's build recorded them."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path

RECORD = Path("/usr/share/aerie/patches")
"""Where `patches/apply.py` left the series, its patches, and its digest."""


@dataclass(frozen=True)
class Series:
    """The names of the patches in order of application, with the fields of their headers, and the series' digest."""

    patches: dict[str, dict[str, str]]
    digest: str


def read(record: Path) -> Series:
    """Read a record; raises OSError where it is not there or not whole."""
    lines = (record / "series").read_text(encoding="utf-8").splitlines()
    names = [name for line in lines if (name := line.split("#", 1)[0].strip())]
    headers = {name: _header((record / name).read_text(encoding="utf-8")) for name in names}
    return Series(headers, (record / "digest").read_text(encoding="utf-8").strip())


def not_applied(record: Path, site_packages: Path) -> list[str]:
    """Return the patches of a record whose added lines are not in the files below `site_packages`, in order.

    Raises OSError where the record is not whole.
    """
    return [name for name in read(record).patches if not _is_applied(record / name, site_packages)]


def _is_applied(patch: Path, site_packages: Path) -> bool:
    for file, added in _added_lines(patch.read_text(encoding="utf-8")):
        try:
            lines = set((site_packages / file).read_text(encoding="utf-8").splitlines())
        except OSError:
            return False
        if added not in lines:
            return False
    return True


def _added_lines(patch: str) -> Iterator[tuple[str, str]]:
    """Yield each line that a patch adds, with its file."""
    file, is_header = "", True
    for line in patch.splitlines():
        is_header = is_header and not line.startswith("--- a/")
        if line.startswith("+++ b/"):
            file = line.removeprefix("+++ b/")
        elif line.startswith("+") and not is_header:
            yield file, line[1:]


def _header(patch: str) -> dict[str, str]:
    # DEP-3 has the form of a mail's header, folded lines included.
    fields = HeaderParser().parsestr(patch, headersonly=True).items()
    return {name.lower().replace("-", "_"): " ".join(text.split()) for name, text in fields}


def vllm_version() -> str | None:
    """Return the installed vLLM's version."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def summary() -> str:
    """Return one line: which vLLM, with which patches."""
    try:
        series = read(RECORD)
    except OSError:
        return f"{_vllm()}, and no series of patches is recorded"
    names = ", ".join(name.removesuffix(".patch") for name in series.patches)
    return f"{_vllm()} with {_count(series)}: {names} ({series.digest})"


def report(*, as_json: bool) -> int:
    """Print the series, and of each patch what it does and where it is from; 1 where none is recorded."""
    try:
        series = read(RECORD)
    except OSError as error:
        print(f"aerie: no series of patches is recorded here ({error}); an image of Aerie has one", file=sys.stderr)
        return 1
    if as_json:
        patches = [{"name": name, **fields} for name, fields in series.patches.items()]
        print(json.dumps({"vllm": vllm_version(), "digest": series.digest, "patches": patches}, indent=1))
        return 0
    print(f"{_vllm()} with {_count(series)} ({series.digest})")
    for name, fields in series.patches.items():
        print(f"\n{name}: {fields.get('subject', 'without a subject')}")
        for field in ("origin", "bug", "upstream_status", "drop_when", "test"):
            if field in fields:
                print(f"  {field.replace('_', ' '):<15}  {fields[field]}")
    return 0


def _vllm() -> str:
    return f"vLLM {version}" if (version := vllm_version()) else "vLLM is not installed"


def _count(series: Series) -> str:
    return f"{len(series.patches)} patch{'es' * (len(series.patches) != 1)}"
