"""The weight files of a checkpoint, as its index and the headers of its shards describe them; no weight is read.

A safetensors file is 8 bytes with the header's length (little-endian), the header as JSON, and the tensors' bytes
without a gap (https://huggingface.co/docs/safetensors). safetensors' own reader maps a file and tells neither where its
tensors lie nor by how much it is too short.
"""

import errno
import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

INDEX = "model.safetensors.index.json"
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses more
_LENGTH = 8  # bytes of the header's length
_SHARD = re.compile(r"(.+)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_POINTER = b"version https://git-lfs"
_AT_ONCE = 16  # headers read beside one another, for disks that answer late
_LISTED = 3  # of many names


class Tensor(NamedTuple):
    """One tensor as a header describes it; `dtype` is safetensors' own name, such as BF16 or I32."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with the files, and what to do about it; `fatal` where vLLM could not load them right."""

    text: str
    remedy: str
    fatal: bool = True
    absent: bool = False
    """Whether it is files that are not there: there may be only some on purpose."""
    broken: bool = False
    """Whether it is a file whose header does not fit it: it is cut off, or no such file."""


@dataclass(frozen=True)
class Weights:
    """All that a directory's headers say; with faults, as far as they could be read."""

    tensors: Mapping[str, Tensor]
    faults: tuple[Fault, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())


class _BrokenError(Exception):
    """A file is not a whole safetensors file; the message says in what respect."""


def regular_file(path: Path) -> Path:
    """Return the path of a file, to be opened; raises OSError where it is none: a pipe would be waited for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path


def read_weights(directory: Path) -> Weights:
    """Read the index and every header in `directory`; raises OSError where the directory itself cannot be read."""
    shards = sorted(path for path in directory.iterdir() if path.suffix == ".safetensors")
    index, faults = _read_index(directory)
    faults += _wrong_files(directory, [path.name for path in shards], index)
    tensors: dict[str, Tensor] = {}
    broken = set[str]()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for path, read in zip(shards, pool.map(_try_to_read, shards), strict=True):
            if isinstance(read, Fault):
                faults.append(read)
                broken.add(path.name)
                continue
            if twice := tensors.keys() & read.keys():
                faults.append(
                    Fault(
                        f"{some(twice)} in both {tensors[min(twice)].file} and {path.name}",
                        "remove the file that does not belong here; vLLM takes whichever it reads last",
                    )
                )
            tensors |= read
    if index is not None:
        faults += _against_index(tensors, index, broken)
    return Weights(tensors, tuple(faults))


def _try_to_read(path: Path) -> dict[str, Tensor] | Fault:
    try:
        return _read_header(path)
    except _BrokenError as error:
        return Fault(
            f"{path.name} {error}", f"fetch {path.name} again; its hash shows whether it is whole then", broken=True
        )
    except OSError as error:
        return Fault(f"{path.name} cannot be read: {error.strerror}", f"see the disk, and who may read {path}")


def _read_header(path: Path) -> dict[str, Tensor]:
    with regular_file(path).open("rb") as file:
        size = path.stat().st_size
        start = file.read(len(_POINTER))
        if start == _POINTER:
            raise _BrokenError(f"is a Git LFS pointer of {size} bytes, not the file that it stands for")
        length = int.from_bytes(start[:_LENGTH], "little")
        file.seek(_LENGTH)
        header = file.read(min(length, _LONGEST_HEADER))
    if not header.startswith(b"{") or length > _LONGEST_HEADER:
        raise _BrokenError(f"is no safetensors file: {size:,} bytes that begin with {start[:_LENGTH]!r}")
    if len(header) < length:
        raise _BrokenError(f"is cut off within its header: {size:,} bytes of at least {_LENGTH + length:,}")
    try:
        described = json.loads(header)
        described.pop("__metadata__", None)
        tensors, spans = {}, []
        for name, each in described.items():
            begin, end = each["data_offsets"]
            dtype, shape = each["dtype"], each["shape"]
            spans.append((begin, end))
            if end - begin != math.prod(shape) * _BYTES.get(dtype, 0) and dtype in _BYTES:
                raise _BrokenError(f"gives {name} {end - begin} bytes, and {dtype} {shape} takes others")
            tensors[name] = Tensor(dtype, tuple(shape), path.name, end - begin)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _BrokenError(f"has a header that is not safetensors' ({error})") from None
    spans.sort()
    data = spans[-1][1] if spans else 0
    if size != (whole := _LENGTH + length + data):
        what = "is cut off" if size < whole else "is longer than its header says"
        raise _BrokenError(f"{what}: {size:,} bytes of {whole:,}")
    if any(begin != end for (begin, _), (_, end) in zip(spans, [(0, 0), *spans], strict=False)):
        raise _BrokenError("has tensors that overlap or leave a gap")
    return tensors


def _read_index(directory: Path) -> tuple[dict[str, str] | None, list[Fault]]:
    """Return which file holds each tensor, None without an index; total_size alone is only told."""
    path = directory / INDEX
    try:
        content = json.loads(regular_file(path).read_bytes())
        held = {str(name): str(file) for name, file in content["weight_map"].items()}
    except FileNotFoundError:
        return None, []
    except OSError as error:
        return None, [Fault(f"{INDEX} cannot be read: {error.strerror}", f"see the disk, and who may read {path}")]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return None, [Fault(f"{INDEX} is not an index of safetensors files ({error})", f"fetch {INDEX} again")]
    return held, []


def _wrong_files(directory: Path, present: list[str], index: Mapping[str, str] | None) -> list[Fault]:
    faults = []
    if consolidated := [name for name in present if name.startswith("consolidated")]:
        faults.append(
            Fault(
                f"{some(consolidated)} stands beside the shards",
                "move it elsewhere: vLLM would read it in Mistral's format, and nothing else",
            )
        )
    if not present and not index:
        return [
            *faults,
            Fault(f"no *.safetensors file is in {directory}", "put the checkpoint there or correct the path"),
        ]
    if index is not None:
        named = set(index.values())
        if missing := named - set(present):
            faults.append(_missing(missing, len(named)))
        if others := set(present) - named - set(consolidated):
            faults.append(
                Fault(f"{some(others)} is not in {INDEX}", "vLLM skips what the index does not name", fatal=False)
            )
        return faults
    numbered = [found for name in present if (found := _SHARD.fullmatch(name))]
    expected = {
        f"{found[1]}-{number:0{len(found[2])}}-of-{found[3]}.safetensors"
        for found in numbered
        for number in range(1, int(found[3]) + 1)
    }
    if missing := expected - set(present):
        faults.append(_missing(missing, len(expected)))
    if len(present) > 1:
        faults.append(
            Fault(
                f"{INDEX} is missing", "fetch it: without it vLLM does not notice that a shard is missing", fatal=False
            )
        )
    return faults


def _missing(names: set[str], of: int) -> Fault:
    return Fault(
        f"{len(names)} of {of} shards are missing: {some(names)}",
        "fetch them; the download was not finished",
        absent=True,
    )


def _against_index(tensors: Mapping[str, Tensor], index: Mapping[str, str], broken: set[str]) -> list[Fault]:
    faults = []
    readable = {tensor.file for tensor in tensors.values()}
    lacking = [
        name
        for name, file in index.items()
        if file in readable and file not in broken and (name not in tensors or tensors[name].file != file)
    ]
    if lacking:
        file = index[lacking[0]]
        faults.append(
            Fault(
                f"{INDEX} has {some(lacking)} in {file}, whose header does not",
                "index and shards are of two versions: fetch both from the same revision",
            )
        )
    unnamed = [name for name, tensor in tensors.items() if name not in index and tensor.file in set(index.values())]
    if unnamed:
        faults.append(
            Fault(
                f"{INDEX} lacks {some(unnamed)}, which {tensors[unnamed[0]].file} has",
                "index and shards are of two versions: fetch both from the same revision",
            )
        )
    return faults


def some(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    ordered = sorted(names)
    more = len(ordered) - _LISTED
    return ", ".join(ordered[:_LISTED]) + (f" and {more} more" if more > 0 else "")
