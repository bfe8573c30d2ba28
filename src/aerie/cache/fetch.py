"""`aerie model fetch`: from a source into the staging, proven, and published whole."""

import contextlib
import fnmatch
import hashlib
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aerie
from aerie.cache.download import DiskError, Download, GaveUpError
from aerie.cache.layout import BusyError, Store, StoreError, load_manifest
from aerie.cache.manifest import File, Manifest, ManifestError, content_revision
from aerie.cache.names import NameRefusedError, check_files, check_model, check_revision
from aerie.cache.progress import Aloud, Counts, Display, amount
from aerie.cache.sources.opening import Bucket, Directory, Peer, Repository, SourceTextError, open_source, parse
from aerie.cache.sources.source import Listing, Offer, Source, SourceError, TryAgainError

RESERVE = 2**30
"""Bytes of the file system that stay free."""
LIST_ATTEMPTS = 6
"""Attempts to get the listing: about a minute."""
FIRST_PAUSE = 1.0
"""Seconds before the second one."""
_LONGEST_PAUSE = 60.0
_SHOWN = 5
_FAILED, _USAGE, _INTERRUPTED = 1, 2, 128

_log = logging.getLogger("aerie")


@dataclass(frozen=True, slots=True)
class Options:
    """What the command takes."""

    source: str
    name: str | None
    revision: str | None
    models_dir: Path
    endpoint: str | None
    token_file: Path | None
    transport: str
    connections: int
    limit_rate: int | None
    include: Sequence[str]
    exclude: Sequence[str]
    offline: bool
    wait: bool
    switch: bool
    dry_run: bool
    json: bool


@dataclass(frozen=True, slots=True)
class Result:
    """How it ended well."""

    name: str
    revision: str
    path: str
    files: int
    bytes: int
    fetched_bytes: int
    """That came from the source in this run."""
    seconds: float
    state: str
    """`published`, `there already`, or `not fetched` of a dry run."""
    current: bool
    """Whether `current` is this revision."""


class _Kept:
    """What a run that fails leaves for the next one, in words."""

    def __init__(self) -> None:
        self.counts: Counts | None = None

    def __str__(self) -> str:
        if self.counts is None or not self.counts.here:
            return ""
        here, total = amount(self.counts.here), amount(self.counts.total)
        return f"; {here} of {total} are kept, and the same command goes on from there"


class _FetchError(Exception):
    """It cannot be fetched; the message says why and what to do."""


class _InterruptedError(BaseException):
    """A signal wants it to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def fetch(options: Options) -> int:
    """Run the command and return its exit code."""
    aloud = Aloud()
    logger = logging.getLogger("aerie")
    logger.addHandler(aloud)
    kept = _Kept()
    try:
        with _signals():
            result = _Fetch(options, aloud, kept).run()
    except SourceTextError as error:
        return _refuse(options, str(error), _USAGE)
    except (SourceError, StoreError, GaveUpError, DiskError, TryAgainError, ManifestError, _FetchError) as error:
        return _refuse(options, f"{error}{kept}", _FAILED)
    except _InterruptedError as interruption:
        name = signal.Signals(interruption.number).name
        return _refuse(options, f"ended by {name}{kept}", _INTERRUPTED + interruption.number)
    finally:
        logger.removeHandler(aloud)
    print(json.dumps(asdict(result)) if options.json else _in_words(result))
    return 0


def _refuse(options: Options, message: str, code: int) -> int:
    print(f"aerie model fetch: {message}", file=sys.stderr)
    if options.json:
        print(json.dumps({"state": "failed", "message": message}))
    return code


def _in_words(result: Result) -> str:
    named = f"{result.name}@{result.revision}" if result.revision else result.name
    what = f"{named}: {result.files} files, {amount(result.bytes)}"
    if result.state == "not fetched":
        return f"{what}, of which {amount(result.fetched_bytes)} would be fetched"
    where = f"{result.path}{', which is current' if result.current else ''}"
    if not result.fetched_bytes:
        return f"{what}, {result.state} in {where}; nothing was fetched"
    rate = amount(result.fetched_bytes / max(result.seconds, 0.001))
    return f"{what}, whole, in {where}; {amount(result.fetched_bytes)} fetched in {result.seconds:.0f} s ({rate}/s)"


class _Fetch:
    def __init__(self, options: Options, aloud: Aloud, kept: _Kept) -> None:
        self._kept = kept
        self._options = options
        self._aloud = aloud
        self._began = time.monotonic()
        self._place = parse(options.source)
        self._name = check_model(options.name or _name_of(options.source, self._place))
        self._model = Store(options.models_dir).model(self._name)

    def run(self) -> Result:
        """Do it all; raises what fetch() puts into words."""
        options = self._options
        if not options.models_dir.is_dir():
            raise _FetchError(f"the models directory {options.models_dir} is not there: make it, or give --models-dir")
        # A commit's content never changes: where it is published, nobody needs to be asked.
        if self._is_offline():
            return self._offline()
        if options.dry_run:
            return self._fetch_from(self._listed)
        with self._locked():
            wanted = options.revision
            if wanted is not None and _is_commit(wanted) and not (options.include or options.exclude):
                files = self._published(wanted)
                if files is not None:
                    return self._there(wanted, files)
            return self._fetch_from(self._listed)

    def _is_offline(self) -> bool:
        forbidden = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        return self._options.offline or (isinstance(self._place, Repository) and forbidden)

    def _offline(self) -> Result:
        wanted = self._options.revision
        if wanted is None or not _is_commit(wanted):
            current = self._model.current()
            if current is None or wanted is not None:
                named = (
                    f"revision {wanted!r} is no commit, which only the source can resolve"
                    if wanted
                    else "no --revision"
                )
                raise _FetchError(
                    f"{self._name} cannot be fetched offline, and there is {named}: fetch it with a network first, "
                    "or name a published commit"
                )
            wanted = current
        files = self._published(wanted)
        if files is None:
            raise _FetchError(
                f"{self._name}@{wanted} is not published in {self._options.models_dir}, and offline it cannot be "
                "fetched: run this with a network, or fetch from a directory or a peer"
            )
        if self._options.dry_run:
            return self._result(wanted, files, "there already", 0)
        with self._locked():
            return self._there(wanted, files)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        command = f"aerie model fetch {self._options.source}"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._model.lock(command))
            except BusyError as error:
                if not self._options.wait:
                    raise BusyError(f"{error} (--wait waits)") from None
                print(
                    f"aerie model fetch: waiting, since {error}".partition(": wait for")[0], file=sys.stderr, flush=True
                )
                stack.enter_context(self._model.lock(command, wait=True))
            yield

    def _published(self, revision: str) -> tuple[File, ...] | None:
        """Return the files of a published revision, None where it is not; raises ManifestError and _FetchError."""
        if not self._model.is_published(revision):
            return None
        path = self._model.revision_path(revision)
        files = load_manifest(path).files
        for file in files:
            try:
                size = (path / file.path).lstat().st_size
            except OSError:
                size = -1
            if size != file.size:
                raise _FetchError(
                    f"{path} is published, but {file.path} is not as it was: "
                    f"`aerie model verify --repair {self._name}@{revision}` mends it"
                )
        return files

    def _fetch_from(self, use: Callable[[Source, Listing, tuple[Offer, ...]], Result]) -> Result:
        options = self._options
        with contextlib.closing(
            open_source(
                options.source,
                revision=options.revision,
                endpoint=options.endpoint,
                token_file=options.token_file,
                transport=options.transport,
                limit=options.limit_rate,
            )
        ) as source:
            listing = self._list(source)
            return use(source, listing, self._chosen(source, listing))

    def _list(self, source: Source) -> Listing:
        pause = FIRST_PAUSE
        for attempt in range(LIST_ATTEMPTS):
            try:
                return source.list()
            except TryAgainError as error:
                if attempt + 1 == LIST_ATTEMPTS:
                    hint = "is the address right, the network up, a proxy to be named in HTTPS_PROXY?"
                    raise TryAgainError(f"{error} ({LIST_ATTEMPTS} attempts; {hint})") from None
                wait = pause if error.after is None else min(error.after, _LONGEST_PAUSE)
                _log.warning("%s; asking again in %.0f s", error, wait)
                time.sleep(wait)
                pause *= 2
        raise AssertionError

    def _chosen(self, source: Source, listing: Listing) -> tuple[Offer, ...]:
        options = self._options
        files = tuple(
            offer
            for offer in sorted(listing.files, key=lambda offer: offer.path)
            if (not options.include or _matches(offer.path, options.include))
            and not _matches(offer.path, options.exclude)
        )
        if not files:
            why = "fit --include and --exclude" if listing.files else "are there"
            raise _FetchError(f"of {source.description} no files {why}: nothing was published")
        try:
            check_files(offer.path for offer in files)
            if listing.revision is not None:
                check_revision(listing.revision)
        except NameRefusedError as error:
            raise _FetchError(f"{source.description} is refused: {error}") from None
        return files

    def _listed(self, source: Source, listing: Listing, offers: tuple[Offer, ...]) -> Result:
        revision = listing.revision or self._seen(source, offers)
        if revision is not None and (files := self._published(revision)) is not None:
            self._check_same(revision, files, offers)
            if self._options.dry_run:
                return self._result(revision, files, "there already", 0)
            return self._there(revision, files)
        if self._options.dry_run:
            return self._dry(listing.revision or "", offers)
        return self._download(source, listing.revision, self._key(source, listing), offers)

    def _key(self, source: Source, listing: Listing) -> str:
        """Return what the staging is called: a run for some of the files must not tidy away another one's."""
        options = self._options
        if listing.revision is not None and not (options.include or options.exclude):
            return listing.revision
        parts = [source.description, listing.revision, list(options.include), list(options.exclude)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]

    def _check_same(self, revision: str, files: Sequence[File], offers: Sequence[Offer]) -> None:
        there = {file.path: file for file in files}
        for offer in offers:
            if offer.path not in there:
                raise _FetchError(
                    f"{self._name}@{revision} is published without {offer.path}, which is wanted now: give --name for "
                    f"a second copy with these files, or remove {self._model.revision_path(revision)} and fetch again"
                )
            file = there[offer.path]
            if file.size != offer.size or (offer.sha256 and offer.sha256 != file.sha256):
                raise _FetchError(
                    f"{self._name}@{revision} is published, and its {offer.path} is another one than the source has: "
                    "a revision's content never changes, so one of them is wrong; "
                    f"see `aerie model verify {self._name}@{revision}`"
                )

    def _there(self, revision: str, files: Sequence[File]) -> Result:
        self._switch(revision)
        return self._result(revision, files, "there already", 0)

    def _switch(self, revision: str) -> None:
        if self._options.switch:
            self._model.switch(revision)

    def _result(self, revision: str, files: Sequence[File | Offer], state: str, fetched: int) -> Result:
        return Result(
            self._name,
            revision,
            str(self._model.path / revision),
            len(files),
            sum(file.size for file in files),
            fetched,
            round(time.monotonic() - self._began, 3),
            state,
            self._model.current() == revision,
        )

    def _dry(self, revision: str, offers: tuple[Offer, ...]) -> Result:
        # What is half fetched counts as missing, since a dry run touches nothing.
        return self._result(revision, offers, "not fetched", sum(offer.size for offer in offers))

    def _download(self, source: Source, revision: str | None, key: str, offers: tuple[Offer, ...]) -> Result:
        options = self._options
        staging = self._model.staging(key)
        total = sum(offer.size for offer in offers)
        counts = Counts(total, 0)
        download = Download(
            source,
            offers,
            staging,
            counts,
            connections=options.connections,
            limit=options.limit_rate,
            donors=self._donors(offers),
        )
        counts.there = download.there
        self._kept.counts = counts
        self._check_space(download.to_fetch)
        display = Display(sys.stderr, f"{self._name}@{(revision or 'new')[:8]}", counts, files=len(offers))
        self._aloud.display = display
        if download.there and download.to_fetch:
            display.say(f"aerie model fetch: {amount(download.there)} of {amount(total)} are there from before")
        try:
            files = download.run(display.tick)
        finally:
            display.close()
            self._aloud.display = None
        named = revision or content_revision(files)
        if not self._model.is_published(named):
            self._publish(source, staging, named, files)
        if revision is None:
            self._remember(source, offers, named)
        self._switch(named)
        shutil.rmtree(staging, ignore_errors=True)
        return self._result(named, files, "published", counts.arrived_bytes)

    def _publish(self, source: Source, staging: Path, revision: str, files: tuple[File, ...]) -> None:
        manifest = Manifest(
            name=self._name,
            revision=revision,
            source=source.description,
            files=files,
            tool=f"aerie {aerie.__version__}",
            fetched=datetime.now(UTC).isoformat(timespec="seconds"),
            options=dict(source.options),
        )
        try:
            self._model.publish(staging / "files", manifest, switch=False)
        except OSError as error:
            raise DiskError(
                f"{self._model.path}: {error.strerror or error}, while all was brought to the disk"
            ) from None

    def _check_space(self, needed: int) -> None:
        status = os.statvfs(self._model.path)
        free = status.f_bavail * status.f_frsize
        if needed + RESERVE > free:
            raise _FetchError(
                f"{self._options.models_dir} has {amount(free)} free, and {amount(needed)} are to come, with "
                f"{amount(RESERVE)} to spare: free {amount(needed + RESERVE - free)} (`aerie model prune` frees old "
                "revisions)"
            )

    def _donors(self, offers: Sequence[Offer]) -> dict[str, Path]:
        """Return files of published revisions, by the SHA-256 that their manifest gives."""
        wanted = {offer.sha256 for offer in offers if offer.sha256}
        found: dict[str, Path] = {}
        for revision in self._model.revisions():
            path = self._model.revision_path(revision)
            with contextlib.suppress(ManifestError):
                found.update(
                    {file.sha256: path / file.path for file in load_manifest(path).files if file.sha256 in wanted}
                )
        return found

    # A source without revisions names its content by what changes with it; what that came to is noted, so that the same
    # is not fetched again.

    def _note(self, source: Source) -> Path:
        return self._model.own / "seen" / hashlib.sha256(source.description.encode()).hexdigest()[:40]

    def _seen(self, source: Source, offers: Sequence[Offer]) -> str | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note: Any = json.loads(self._note(source).read_text())
            if note["listing"] == _listing_digest(offers):
                return check_revision(note["revision"])
        return None

    def _remember(self, source: Source, offers: Sequence[Offer], revision: str) -> None:
        if any(not (offer.version or offer.sha256) for offer in offers):
            return
        note = self._note(source)
        with contextlib.suppress(OSError):
            note.parent.mkdir(exist_ok=True)
            draft = note.with_suffix(".new")
            draft.write_text(json.dumps({"listing": _listing_digest(offers), "revision": revision}))
            draft.replace(note)


def _listing_digest(offers: Sequence[Offer]) -> str:
    fields = [[offer.path, offer.size, offer.sha256, offer.git_sha1, offer.version] for offer in offers]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, f"{each}*" if each.endswith("/") else each) for each in patterns)


def _is_commit(text: str) -> bool:
    try:
        check_revision(text)
    except NameRefusedError:
        return False
    return True


def _name_of(text: str, place: Repository | Bucket | Directory | Peer) -> str:
    """Return the last part of a source that is a name; raises NameRefusedError where there is none."""
    match place:
        case Repository(name=name):
            parts = name.split("/")
        case Bucket(bucket=bucket, prefix=prefix):
            parts = [bucket, *filter(None, prefix.split("/"))]
        case Directory(path=path):
            parts = list(path.parts)
        case Peer(path=path):
            parts = path.split("/")
    # A revision in another store.
    while len(parts) > 1 and (parts[-1] in {"", ".", "current", "previous"} or _is_commit(parts[-1])):
        parts.pop()
    try:
        return check_model(parts[-1])
    except NameRefusedError as error:
        raise NameRefusedError(f"{text} gives the model no name ({error}): give --name NAME") from None


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM end what is done by an error, the first time; a second one ends the process."""

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _InterruptedError(number)

    caught = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, interrupt) for each in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
