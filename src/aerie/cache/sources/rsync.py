"""Weights from a peer by the program rsync: from a daemon of its own, or through ssh."""

import contextlib
import fcntl
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from aerie.cache.manifest import MANIFEST
from aerie.cache.sources.opening import Peer
from aerie.cache.sources.published import LARGEST_MANIFEST, NOT_THE_MODELS, published, within
from aerie.cache.sources.source import Listing, Offer, SourceError, TryAgainError
from aerie.cache.words import quoted

_PIECE = 2**20
_TIMEOUT = 60  # seconds in which nothing comes
_CONNECT_TIMEOUT = 20  # seconds
_POLL = 0.005  # seconds between looks at what came
_ABANDONED = 10  # seconds after which what nobody holds is removed
_MOST_FILES = 100_000
_SMALLEST_LIMIT = 2**20  # bytes of a file that what rsync starts may write
_WINDOW = 2**20  # bytes under way, which are lost where a part of a file was asked for and has come
_LISTED = re.compile(rb"(.)\S{9,10} +([0-9]+) ([0-9]{4}/[0-9]{2}/[0-9]{2}) ([0-9:]{8}) (.*)")
_ESCAPED = re.compile(rb"\\#([0-7]{3})")
_FOLLOWED = re.compile(r"rsync: (connection unexpectedly closed|\[\w+\] write error: Broken pipe)|rsync warning: ")
_SSH_OPTIONS = (
    "-oBatchMode=yes", f"-oConnectTimeout={_CONNECT_TIMEOUT}", "-oServerAliveInterval=15", "-oServerAliveCountMax=4",
    "-oClearAllForwardings=yes",
)  # fmt: skip
_CODE_OF_SSH = 255
_NO_SUCH_COMMAND = 127


@dataclass(frozen=True, slots=True)
class _Reason:
    said: re.Pattern[str]
    words: str
    later: bool = False


def _reason(said: str, words: str, *, later: bool = False) -> _Reason:
    return _Reason(re.compile(said, re.IGNORECASE), words, later)


# The first whose pattern is found in what rsync and ssh say.
_REASONS = (
    _reason(r"max connections", "has as many callers as it takes; fewer --connections leave it room", later=True),
    _reason(r"unknown module", "has no such module: `rsync {address}` lists those that it has"),
    _reason(r"auth failed", "asks for a password or refuses it: put it into RSYNC_PASSWORD, and the user before the @"),
    _reason(r"access denied", "does not let this machine in: see `hosts allow` of the module"),
    _reason(
        r"identification has changed",
        "shows another host key than the one that is known: where that is right, run `ssh-keygen -R {host}`, then "
        "`ssh {login}` once by hand",
    ),
    _reason(
        r"host key verification failed|no .* host key is known",
        "has a host key that is not known here: run `ssh {login}` once by hand and compare it",
    ),
    _reason(
        r"permission denied \([a-z-,]*(publickey|password|keyboard|gssapi|hostbased)",
        "lets nobody in with the keys of this user: `ssh -o BatchMode=yes {login}` must work without a question; "
        "`ssh-copy-id {login}` gives it a key",
    ),
    _reason(r"too many authentication", "refuses the many keys of the agent: name one for it in ~/.ssh/config"),
    _reason(
        r"name or service not known|no address associated", "is a name that is not known here: look at its spelling"
    ),
    _reason(r"temporary failure in name resolution", "cannot be looked up now", later=True),
    _reason(r"command not found|rsync: not found|\(code 127\)", "has no rsync: install it there"),
    _reason(
        r"is your shell clean|protocol version mismatch",
        "prints something at each login, which rsync takes for its own: make `ssh {login} true` silent",
    ),
    _reason(
        r"no space left on device", "was read, but there is no room for temporary files: name a directory in TMPDIR"
    ),
    _reason(r"stale file handle|input/output error", "could not read it now", later=True),
    _reason(r"symlink has no referent", "has a link to nothing there: the download that it is of was not finished"),
    _reason(r"has vanished|no such file or directory|not a directory", "does not have it: is the path right?"),
    _reason(r"permission denied", "may not read it there: let the user, or the daemon's, read it"),
    _reason(
        r"unknown option|is configured to refuse|not supported",
        "does not take what it is asked: both sides need rsync 3.1 or later, and a module without `refuse options`",
    ),
)
_CODES_TO_TRY_AGAIN = {10, 12, 13, 20, 30, 35, _CODE_OF_SSH}
"""Socket, protocol stream, diagnostics, a signal, two time-outs, and ssh's own of every connection that broke."""


class RsyncSource:
    """The files below a peer's directory, or those that a manifest of Aerie's there lists.

    rsync reads no ranges, but it appends: told that a file is there up to `start`, by a sparse one, it sends what
    follows; a limit on the size of what it may write ends it at `end`. Each `read` is a process and a connection.
    """

    def __init__(self, peer: Peer, *, revision: str | None = None, limit: float | None = None) -> None:
        login = f"{peer.user}@{peer.host}" if peer.user else peer.host
        port = f":{peer.port}" if peer.port else ""
        self._address = f"rsync://{login}{port}/" if peer.daemon else f"{login}:"
        self.description = f"{self._address}{peer.path}"
        self.options: dict[str, str] = {}
        self._named = {"host": peer.host, "login": login, "address": self._address}
        self._daemon = peer.daemon
        # By ssh, a relative path is below the home directory; a shell that would know ~ is not asked.
        path = peer.path if peer.daemon else peer.path.removeprefix("~/").removeprefix("~") or "."
        # A daemon is asked by its module's root: of 3.5.0's, without chroot, files named below another have vanished.
        module, _, below = path.partition("/") if peer.daemon else (path, "", "")
        self._root = f"{self._address}{module}".rstrip("/") + "/"
        self._path = f"{below}/" if below else ""
        self._below = self._path
        self._revision = revision
        self._limit = limit
        self._lock = threading.Lock()
        self._reads = 0
        self._running: set[subprocess.Popen[bytes]] = set()
        self._space: tempfile.TemporaryDirectory[str] | None = None
        self._held: int | None = None

    def list(self) -> Listing:
        """Return the files of the peer's directory; with a manifest, those that it lists, with its digests.

        Raises SourceError where rsync is not installed, the peer lets nobody in, or has no such directory;
        TryAgainError where it cannot be reached.
        """
        for program, package in (("rsync", "rsync"), *(() if self._daemon else ((_ssh()[0], "openssh-client"),))):
            if shutil.which(program) is None:
                raise SourceError(f"{self.description} needs {program}, which is not installed: install {package}")
        self._make_space()
        self._below = self._path
        # A model's directory of Aerie's has its revisions as folders, and a link to one of them.
        top = {name if kind == "-" else f"{name}/{MANIFEST}": kind for kind, name, _, _ in self._entries("--dirs")}
        if MANIFEST not in top and f"current/{MANIFEST}" in top:
            names = {f"current/{MANIFEST}"} | {name for name in top if re.match(r"[0-9a-f]{40}/", name)}
            self._below = self._path + within(names, self.description, self._revision)
        found = {}
        for kind, name, size, version in self._entries("--recursive"):
            if kind not in "-d":
                what = {"p": "a pipe", "s": "a socket", "l": "a link to nothing"}.get(kind, "no file")
                raise SourceError(f"{self.description}: {name} is {what}, which no model has: take it away")
            if kind == "-":
                found[name] = (size, version)
        if not found:
            raise SourceError(f"{self.description} has no files: is the path right?")
        if MANIFEST in found:
            return published(self._manifest(*found[MANIFEST]), self.description, found, self._revision)
        offers = (Offer(name, size, version=version) for name, (size, version) in sorted(found.items()))
        return Listing(tuple(offers), None)

    def read(self, offer: Offer, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of a file that `list` has given.

        Raises SourceError where the file is another one now, TryAgainError where the connection breaks.
        """
        if start == end:
            return
        assert self._space  # noqa: S101 - `list` comes first
        try:
            with self._counted(), tempfile.TemporaryDirectory(dir=self._space.name) as place:
                target = Path(place, "files", self._below + offer.path)
                target.parent.mkdir(parents=True)
                file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    os.truncate(file, start)
                    yield from self._appended(offer, start, end, Path(place), file)
                finally:
                    os.close(file)
        except OSError as error:
            raise SourceError(
                f"{self.description}/{offer.path} cannot be read by way of {tempfile.gettempdir()}: "
                f"{error.strerror}; name a directory with room for temporary files in TMPDIR"
            ) from error

    def close(self) -> None:
        """End what runs, also where its reader waits and is not waited for, and remove what it left."""
        with self._lock:
            running = tuple(self._running)
        for process in running:
            _kill(process)
        if self._space is not None:
            self._space.cleanup()
            self._space = None
        if self._held is not None:
            os.close(self._held)
            self._held = None

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count who reads, for a fair part of the limit: what rsync brings too early waits here unread."""
        with self._lock:
            self._reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._reads -= 1

    def _appended(self, offer: Offer, start: int, end: int, place: Path, file: int) -> Iterator[bytes]:
        (place / "names").write_bytes(os.fsencode(self._below + offer.path) + b"\0")
        command = self._command(
            "--append", "--inplace", "--no-implied-dirs", f"--files-from={place / 'names'}", "--from0",
            "--out-format=%l %M", self._root, f"{place / 'files'}/",
        )  # fmt: skip
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            process = _start(command, out.fileno(), err.fileno())
        with self._lock:
            self._running.add(process)
        try:
            limit = max(end, _SMALLEST_LIMIT)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, limit))
            at = start
            while at < end:
                # Looked at first, since what has come by its end counts.
                ended = process.poll() is not None
                ready = min(os.fstat(file).st_size, end) - at
                if ready > 0:
                    piece = os.pread(file, min(_PIECE, ready), at)
                    at += len(piece)
                    if at == end:
                        self._unchanged(offer, place)
                    yield piece
                elif ended:
                    self._unchanged(offer, place)
                    raise self._failure(process.returncode, (place / "err").read_text(errors="replace"), offer.path)
                else:
                    time.sleep(_POLL)
        finally:
            _kill(process)
            process.wait()
            with self._lock:
                self._running.discard(process)

    def _unchanged(self, offer: Offer, place: Path) -> None:
        """Raise SourceError where rsync names another size or time than it did when it listed the file."""
        said = (place / "out").read_text(errors="replace").split("\n")[0].strip()
        if said and offer.version != _version(said):
            raise SourceError(
                f"{self.description}/{offer.path} has changed since it was listed: let what writes it end, then run "
                "this again"
            )

    def _entries(self, depth: str) -> Iterator[tuple[str, str, int, str]]:
        """Yield what the directory has, links followed: kind, name, size, version."""
        assert self._space  # noqa: S101 - `list` makes it
        left_out = [f"--exclude=/{name}" for name in NOT_THE_MODELS]
        command = self._command("--list-only", depth, *left_out, self._root + self._below)
        with tempfile.TemporaryFile(dir=self._space.name) as out, tempfile.TemporaryFile(dir=self._space.name) as err:
            process = _start(command, out.fileno(), err.fileno())
            try:
                code = process.wait()
            finally:
                _kill(process)
                process.wait()
            err.seek(0)
            if code != 0:
                raise self._failure(code, err.read().decode(errors="replace"), "")
            out.seek(0)
            for number, line in enumerate(out):
                if number > _MOST_FILES:
                    raise SourceError(f"{self.description} has over {_MOST_FILES} files: is the path right?")
                if not (found := _LISTED.fullmatch(line.rstrip(b"\n"))):
                    raise SourceError(f"{self.description}: rsync lists {quoted(line.decode(errors='replace'))!r}")
                kind, size, day, hour, name = found.groups()
                # Control characters, and what is no UTF-8, come as \#ooo.
                name = _ESCAPED.sub(lambda escaped: bytes([int(escaped[1], 8)]), name)
                if name != b".":
                    version = f"{size.decode()} {day.decode()}-{hour.decode()}"
                    yield kind.decode(errors="replace"), os.fsdecode(name), int(size), version

    def _manifest(self, size: int, version: str) -> str:
        if size > LARGEST_MANIFEST:
            raise SourceError(f"{self.description}/{MANIFEST} has {size} bytes: it is not one that Aerie wrote")
        try:
            return b"".join(self.read(Offer(MANIFEST, size, version=version), 0, size)).decode()
        except UnicodeDecodeError:
            raise SourceError(f"{self.description}/{MANIFEST} is not text: it is not one that Aerie wrote") from None

    def _command(self, *arguments: str) -> tuple[str, ...]:
        reach = (
            (f"--contimeout={_CONNECT_TIMEOUT}", f"--sockopts=SO_RCVBUF={_WINDOW}", "--no-motd")
            if self._daemon
            else (f"--rsh={shlex.join(_ssh())}",)
        )
        if self._limit is not None and (kib := self._limit / 1024 / max(1, self._reads)):
            reach = (*reach, f"--bwlimit={max(1, int(kib))}")
        # --protect-args: no shell on the other side takes a path apart. Behind -- nothing is an option.
        *options, last = arguments
        plain = [each for each in options if each.startswith("--")]
        paths = [each for each in (*options, last) if not each.startswith("--")]
        common = ("--copy-links", "--no-human-readable", "--protect-args", f"--timeout={_TIMEOUT}")
        return ("rsync", *reach, *common, *plain, "--", *paths)

    def _make_space(self) -> None:
        """Make a directory for what rsync writes; of one that was killed, the next removes it."""
        self.close()
        for left in Path(tempfile.gettempdir()).glob("aerie-rsync-*"):
            with contextlib.suppress(OSError):
                _remove_abandoned(left)
        self._space = tempfile.TemporaryDirectory(prefix="aerie-rsync-")
        self._held = os.open(self._space.name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._held, fcntl.LOCK_EX)

    def _failure(self, code: int, said: str, name: str) -> SourceError | TryAgainError:
        where = f"{self.description}/{name}".rstrip("/")
        words = _said(said)
        for reason in _REASONS:
            if reason.said.search(said):
                message = f"{where}: {self._named['host']} {reason.words.format(**self._named)} ({words})"
                return TryAgainError(message) if reason.later else SourceError(message)
        if code == _NO_SUCH_COMMAND:
            return SourceError(f"{where}: {self._named['host']} has no rsync: install it there ({words})")
        if code in _CODES_TO_TRY_AGAIN or code < 0:
            return TryAgainError(f"{where}: the connection to {self._named['host']} failed ({words or f'code {code}'})")
        if code == 0:
            return SourceError(
                f"{where} is shorter than it was when it was listed: let what writes it end, then run this again"
            )
        return SourceError(f"{where}: rsync ended with code {code} ({words})")


def _ssh() -> Sequence[str]:
    """Return how ssh is called: never with a question, since nobody may be there to answer."""
    program = shlex.split(os.environ.get("RSYNC_RSH", "")) or ["ssh"]
    return (*program, *_SSH_OPTIONS) if Path(program[0]).name == "ssh" else program


def _start(command: Sequence[str], out: int, err: int) -> "subprocess.Popen[bytes]":
    # In a session of its own there is no terminal to ask for a password on, and Ctrl-C is the caller's. A write beyond
    # the limit is an error and no signal, as in Python, so that rsync ends in order.
    settings = {"LC_ALL": "C.UTF-8", "TZ": "UTC0", "SSH_ASKPASS_REQUIRE": "never"}
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={**os.environ, **settings},
        start_new_session=True, restore_signals=False,
    )  # fmt: skip


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill rsync with its other half and ssh, if they are still there."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _remove_abandoned(left: Path) -> None:
    """Remove a directory of this user's that nobody holds; raises OSError where somebody does."""
    held = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(held)
        # A young one may be about to be held.
        if status.st_uid == os.geteuid() and time.time() - status.st_mtime > _ABANDONED:
            shutil.rmtree(left)
    finally:
        os.close(held)


def _version(said: str) -> str:
    return " ".join(said.replace(",", "").split())


def _said(said: str) -> str:
    """Return what was said, without rsync's words about what followed from it."""
    lines = [line.strip() for line in said.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("@@@", "@ WARNING", "rsync error: "))]
    first = [line for line in lines if not _FOLLOWED.match(line)]
    return quoted("; ".join(first or lines))
