"""Compiled graphs and kernels on the cache volume: kept apart by what they depend on, proven before they are used.

<cache>/engines/<key>/   vLLM's and inductor's: of this software, machine, arguments and environment
<cache>/kernels/<key>/   Triton's, FlashInfer's, CUDA's and the like: of this software and machine. They name each
                         kernel by its source and options themselves, so that other arguments may share them.
<either>/<key>.poisoned-<n>/   set aside, the last one, for a look

vLLM's own key leaves out what its authors did not think of, and none of them look whether a file is still what was
written. So once an engine is ready the digests of all files are recorded; before the next start they are compared.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from aerie import patches
from aerie.diagnosis import Diagnosis
from aerie.diagnosis.signatures import signatures
from aerie.engine_arguments import read_arguments
from aerie.supervisor.json_file import JsonFile

_log = logging.getLogger("aerie")

_ENGINES, _KERNELS = "engines", "kernels"
_RECORD = "aerie-cache.json"
_SCHEMA = 1
_KEPT = {_ENGINES: 3, _KERNELS: 2}
"""Of each, by their last use: one start's take up to some gigabytes."""
_PLACES = {
    _ENGINES: {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"},
    _KERNELS: {
        "TRITON_CACHE_DIR": "triton",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "TORCH_EXTENSIONS_DIR": "torch_extensions",
        "TILELANG_CACHE_DIR": "tilelang",
        "CUTE_DSL_CACHE_DIR": "cute_dsl",
        "QUACK_CACHE_DIR": "quack",
        "CUDA_CACHE_PATH": "cuda",
    },
}
_OF_CLIENTS = frozenset({
    "host", "port", "served-model-name", "shutdown-timeout", "disable-access-log-for-endpoints", "chat-template",
    "reasoning-parser", "tool-call-parser", "enable-auto-tool-choice", "allowed-media-domains", "load-format",
    "safetensors-load-strategy", "model-loader-extra-config", "api-server-count", "ssl-keyfile", "ssl-certfile",
})  # fmt: skip
"""Arguments that change nothing of what is compiled."""
_COMPILES = ("VLLM_", "TORCH", "TRITON_", "CUDA_", "FLASHINFER_", "NVIDIA_TF32", "CC", "CXX", "CFLAGS", "CXXFLAGS")
"""Beginnings of the environment variables that may."""
_UNSETTLED = (".lock", ".tmp", ".pid", ".new")
_CHECKED_WITHIN = 10.0  # seconds; what is left then is not looked at
_AT_ONCE = 4
_PIECE = 2**20
_NICE = 15


@dataclass(frozen=True)
class Keys:
    """What names a start's caches."""

    software: str
    engine: str


def keys(words: Sequence[str], environment: Mapping[str, str], machine: str) -> Keys:
    """Return the keys for these arguments; `machine` names the GPUs and their driver. Takes a tenth of a second."""
    software = hashlib.sha256("\n".join([*_software(), machine, _processor()]).encode()).hexdigest()[:16]
    given = {name: value for name, value in read_arguments(words).items() if name not in _OF_CLIENTS}
    places = {name for each in _PLACES.values() for name in each}
    # VLLM_CACHE_ROOT and the like say where, and not what.
    counts = sorted(pair for pair in environment.items() if pair[0].startswith(_COMPILES) and pair[0] not in places)
    engine = hashlib.sha256(repr((software, sorted(given.items(), key=lambda pair: pair[0]), counts)).encode())
    return Keys(software, engine.hexdigest()[:16])


def _software() -> Iterator[str]:
    """Yield what the image's Python packages are, to the byte: an image does not know its own name."""
    yield patches.summary()
    for each in sorted(metadata.distributions(), key=lambda one: (one.name or "", one.version)):
        if each.name == "aerie":
            continue  # its own code compiles nothing
        record = each.read_text("RECORD") or ""
        yield f"{each.name} {each.version} {hashlib.sha256(record.encode()).hexdigest()}"


def _processor() -> str:
    """Return what inductor's C++ is compiled for: on another processor such code ends with an illegal instruction."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("flags")), "")
    return ""


@dataclass
class Cache:
    """One directory of the two, while an engine uses it."""

    path: Path
    is_warm: bool = False
    """Whether something was in it when the engine started."""
    rebuilt: bool = False
    """Whether it is new after one was set aside, and no engine has become ready with it since."""
    _held: int | None = field(default=None, repr=False)

    @property
    def file(self) -> JsonFile:
        """What is known of it."""
        return JsonFile(self.path / _RECORD, "its files are not proven before the next start")

    def open(self) -> None:
        """Make and hold it, and set it aside first where it is not what was recorded. Raises OSError."""
        known = self.file.read()
        if why := damage(self.path, known):
            _log.warning("the cache %s is damaged: %s", self.path, why)
            self.set_aside()
            known = {"rebuilt": True}
        self.path.mkdir(parents=True, exist_ok=True)
        self._hold()
        self.rebuilt = bool(known.get("rebuilt"))
        self.is_warm = any(True for _ in _files(self.path))
        self.file.write({**known, "schema": _SCHEMA, "boot": _boot(), "used": _now()})

    def set_aside(self) -> Path | None:
        """Rename it, and remove what was set aside before; return where it is now, None where that failed."""
        self.release()
        older = sorted(self.path.parent.glob("*.poisoned-*"))
        numbers = [int(each.suffix.rpartition("-")[2]) for each in older if each.suffix.rpartition("-")[2].isdecimal()]
        place = self.path.with_name(f"{self.path.name}.poisoned-{max(numbers, default=0) + 1}")
        try:
            self.path.rename(place)
        except OSError as error:
            _log.error("%s cannot be set aside: %s", self.path, error.strerror)
            return None
        for each in older:
            shutil.rmtree(each, ignore_errors=True)
        _log.warning("it is set aside as %s, and what it held is compiled anew", place)
        return place

    def renew(self) -> bool:
        """Set it aside after a failed start and begin anew, marked as such; return whether that was done."""
        if self.set_aside() is None:
            return False
        with suppress(OSError):
            self.path.mkdir(parents=True)
            self.file.write({"schema": _SCHEMA, "boot": _boot(), "used": _now(), "rebuilt": True})
        return True

    def record(self) -> None:
        """Note what every file is, now that an engine is ready with them; those that are as recorded are not read."""
        os.nice(_NICE)  # of this thread alone
        before = _recorded(self.file.read())
        files: dict[str, list[Any]] = {}
        for path in _files(self.path):
            name = str(path.relative_to(self.path))
            with suppress(OSError):  # gone meanwhile
                about = _about(path)
                old = before.get(name)
                files[name] = old if old and old[:3] == about else [*about, _digest(path, sync=True)]
        self.file.write({"schema": _SCHEMA, "boot": _boot(), "used": _now(), "proven": True, "files": files})

    def release(self) -> None:
        """Let another one prune it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _hold(self) -> None:
        self.release()
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.flock(self._held, fcntl.LOCK_SH | fcntl.LOCK_NB)


class Caches:
    """The caches of one start."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        """`environment` is the engine's: only what it keeps below `directory` is kept apart."""
        self._directory = directory
        self._given = environment
        self._caches: dict[str, Cache] = {}

    def open(self, name: Callable[[], Keys]) -> dict[str, str]:
        """Prove and open them by the keys that `name` finds; return the variables that lead an engine there.

        Nothing is done for an environment that keeps all of it elsewhere. Raises OSError.
        """
        self.release()
        self._caches.clear()
        ours = {
            kind: {each: place for each, place in places.items() if self._is_ours(self._given.get(each))}
            for kind, places in _PLACES.items()
        }
        if not any(ours.values()):
            return {}
        named, variables = name(), dict[str, str]()
        for kind, key in ((_ENGINES, named.engine), (_KERNELS, named.software)):
            if ours[kind]:
                cache = self._caches[kind] = Cache(self._directory / kind / key)
                cache.open()
                variables |= {each: str(cache.path / place) for each, place in ours[kind].items()}
        return variables

    def _is_ours(self, place: str | None) -> bool:
        return bool(place) and Path(place or "").is_relative_to(self._directory)

    def proven(self) -> None:
        """Record what an engine became ready with, and remove what nobody used for long. Reads all of it."""
        for kind, cache in self._caches.items():
            cache.record()
            cache.rebuilt = False
            prune(self._directory / kind, _KEPT[kind])

    def blame(self, diagnosis: Diagnosis) -> str | None:
        """After a failed start: set aside what may have brought it about; return in words what was done.

        None where the caches have nothing to do with it. Nothing is set aside twice for the same failure.
        """
        if diagnosis.signature not in _of_caches():
            return None
        clean = [cache for cache in self._caches.values() if cache.rebuilt or not cache.is_warm]
        if len(clean) == len(self._caches):
            return "it failed with new caches, too: the failure is the engine's own, and no cache is set aside"
        done = [cache for cache in self._caches.values() if cache not in clean and cache.renew()]
        if not done:
            return None
        return (
            f"the caches are set aside, and the next start compiles anew: {', '.join(str(each.path) for each in done)}"
        )

    def release(self) -> None:
        """Let others prune them: the engine is gone."""
        for cache in self._caches.values():
            cache.release()


def damage(directory: Path, known: Mapping[str, Any]) -> str | None:
    """Return what of a cache is not as it was recorded; None where nothing is found. Raises OSError.

    Whoever writes such a file writes another one and renames it: in the same inode nothing may change. A file that is
    gone, or was replaced by another whole one, is nobody's fault.
    """
    if not directory.is_dir():
        return None
    if known.get("files") is None:
        # Half written, and since then the machine went down: nothing of it need have reached the disk.
        lost = known.get("boot") not in (None, _boot()) and not known.get("proven")
        return "the machine went down before an engine was ready with it" if lost else None
    recorded, to_read = _recorded(known), []
    for name, (size, changed, inode, digest) in recorded.items():
        path = directory / name
        try:
            now = _about(path)
        except OSError:
            continue
        if now[2] != inode:
            if now[0] == 0 and size:
                return f"{name} is empty"
        elif now != [size, changed, inode]:
            return f"{name} was changed in place"
        else:
            to_read.append((size, path, name, digest))
    return _wrong_content(sorted(to_read))


def _wrong_content(files: Sequence[tuple[int, Path, str, str]]) -> str | None:
    deadline = time.monotonic() + _CHECKED_WITHIN

    def look(one: tuple[int, Path, str, str]) -> str | None:
        _, path, name, digest = one
        if time.monotonic() > deadline:
            return None
        try:
            return None if _digest(path) == digest else f"{name} has other content than it had"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return next(filter(None, pool.map(look, files)), None)


def prune(directory: Path, kept: int) -> None:
    """Remove the caches below `directory` that were used least lately, but for `kept` and those that are in use."""
    found = [each for each in directory.iterdir() if each.is_dir() and ".poisoned-" not in each.name]
    used = {each: str(JsonFile(each / _RECORD, "").read().get("used", "")) for each in found}
    for each in sorted(found, key=lambda one: used[one], reverse=True)[kept:]:
        descriptor = os.open(each, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            _log.info("the cache %s is removed: %d others were used later", each, kept)
            shutil.rmtree(each, ignore_errors=True)
        finally:
            os.close(descriptor)


def _of_caches() -> frozenset[str]:
    return frozenset(each.id for each in signatures() if each.cache)


def _files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if name != _RECORD and not name.endswith(_UNSETTLED) and stat.S_ISREG(_mode(path)):
                yield path


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _about(path: Path) -> list[int]:
    about = path.lstat()
    return [about.st_size, about.st_mtime_ns, about.st_ino]


def _recorded(known: Mapping[str, Any]) -> dict[str, list[Any]]:
    files = known.get("files")
    entries: Iterable[tuple[Any, Any]] = files.items() if isinstance(files, dict) else ()
    return {str(name): entry for name, entry in entries if isinstance(entry, list) and len(entry) == 4}  # noqa: PLR2004 - size, time, inode, digest


def _digest(path: Path, *, sync: bool = False) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
