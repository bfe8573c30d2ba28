"""`aerie model fetch`: from a source into the staging, proven, and published whole."""

import contextlib
import fnmatch
import hashlib
import json
import logging
import os
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import aerie
from aerie.cache.directories import StoreError
from aerie.cache.download import Download
from aerie.cache.headers import WEIGHTS, is_incomplete, odd_headers, told
from aerie.cache.layout import BusyError, Store, load_manifest
from aerie.cache.ledger import Ledger, boot_id
from aerie.cache.manifest import File, Manifest, ManifestError, content_revision
from aerie.cache.names import NameRefusedError, check_files, check_model, check_revision, is_revision
from aerie.cache.patience import GaveUpError
from aerie.cache.progress import Aloud, Counts, Display, amount
from aerie.cache.result import Result, in_words
from aerie.cache.seen import Seen
from aerie.cache.sources.opening import Repository, SourceTextError, hint_for, name_of, open_source, parse
from aerie.cache.sources.published import why_no_model
from aerie.cache.sources.source import Listing, Offer, Source, SourceError, TryAgainError
from aerie.cache.staging import DiskError
from aerie.cache.whose import refuse_the_service
from aerie.cache.words import printable

RESERVE = 2**30
"""Bytes of the file system that stay free."""
LIST_ATTEMPTS = 6
"""Attempts to get the listing: about a minute."""
FIRST_PAUSE = 1.0
"""Seconds before the second one."""
_LONGEST_PAUSE = 60.0
_OFFLINE = "HF_HUB_OFFLINE"
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
    as_it_is: bool
    dry_run: bool
    json: bool


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
        if not options.dry_run:
            refuse_the_service("aerie model fetch")
        with _signals():
            result = _Fetch(options, aloud, kept).run()
    except SourceTextError as error:
        return _refuse(options, str(error), _USAGE)
    except NameRefusedError as error:
        return _refuse(options, printable(str(error)), _USAGE)
    except (SourceError, StoreError, GaveUpError, DiskError, TryAgainError, ManifestError, _FetchError) as error:
        return _refuse(options, printable(f"{error}{kept}"), _FAILED)
    except _InterruptedError as interruption:
        name = signal.Signals(interruption.number).name
        return _refuse(options, f"ended by {name}{kept}", _INTERRUPTED + interruption.number)
    finally:
        logger.removeHandler(aloud)
    print(json.dumps(asdict(result)) if options.json else in_words(result))
    return 0


def _refuse(options: Options, message: str, code: int) -> int:
    print(f"aerie model fetch: {message}", file=sys.stderr)
    if options.json:
        print(json.dumps({"state": "failed", "message": message}))
    return code


class _Fetch:
    def __init__(self, options: Options, aloud: Aloud, kept: _Kept) -> None:
        self._kept = kept
        self._options = options
        self._aloud = aloud
        self._began = time.monotonic()
        self._leaves_out_weights = False
        self._place = parse(options.source)
        self._name = check_model(options.name or name_of(options.source, self._place))
        self._model = Store(options.models_dir).model(self._name)

    def run(self) -> Result:
        """Do it all; raises what fetch() puts into words."""
        options = self._options
        if not options.models_dir.is_dir():
            what = "is no directory" if options.models_dir.exists() else "is not there"
            raise _FetchError(f"the models directory {options.models_dir} {what}: make it, or give --models-dir")
        # A commit's content never changes: where it is published, nobody needs to be asked.
        if self._is_offline():
            return self._offline()
        if options.dry_run:
            return self._told_there() or self._fetch_from(self._listed)
        with self._locked():
            found = self._told_there()
            if found is None:
                return self._fetch_from(self._listed)
            self._switch(found.revision)
            return replace(found, current=self._model.current() == found.revision)

    def _told_there(self) -> Result | None:
        """Return that the commit that is wanted is published; None where none is, or it is not."""
        wanted = self._options.revision
        if wanted is None or not is_revision(wanted):
            return None
        files = self._published(wanted)
        return None if files is None else self._result(wanted, files, "there already", 0)

    def _is_offline(self) -> bool:
        forbidden = os.environ.get(_OFFLINE, "").upper() in {"1", "ON", "YES", "TRUE"}
        return self._options.offline or (isinstance(self._place, Repository) and forbidden)

    def _why_offline(self) -> str:
        return "offline (--offline)" if self._options.offline else f"offline ({_OFFLINE}={os.environ[_OFFLINE]})"

    def _offline(self) -> Result:
        wanted = self._options.revision
        if wanted is None or not is_revision(wanted):
            current = self._model.current()
            if current is None or wanted is not None:
                named = (
                    f"which commit {wanted!r} is only the source can tell"
                    if wanted
                    else "nothing of it is in service here, and no --revision names what is published"
                )
                raise _FetchError(
                    f"{self._name} cannot be fetched {self._why_offline()}, and {named}: fetch it with a network "
                    "first, or name a published commit"
                )
            wanted = current
        files = self._published(wanted)
        if files is None:
            raise _FetchError(
                f"{self._name}@{wanted} is not published in {self._options.models_dir}, and cannot be fetched "
                f"{self._why_offline()}: run this with a network, or fetch from a directory or a peer"
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

    def _published(self, revision: str, chosen: Mapping[str, str] | None = None) -> tuple[File, ...] | None:
        """Return the files of a published revision, None where it is not; raises ManifestError and _FetchError.

        One with some of the files alone has to be by the patterns in `chosen`, those of the command unless given.
        """
        if not self._model.is_published(revision):
            return None
        path = self._model.revision_path(revision)
        manifest = self._model.manifest(revision)
        if manifest.chosen and manifest.chosen != (self._patterns() if chosen is None else chosen):
            by = ", ".join(f"{name} {value}" for name, value in manifest.chosen.items())
            raise _FetchError(
                f"{self._name}@{revision} is published with some of the files alone ({by}): give --name for a second "
                f"copy, or remove {path} and fetch again"
            )
        files = manifest.files
        for file in files:
            if _size(path / file.path) != file.size:
                raise _FetchError(
                    f"{path} is published, but {file.path} is not as it was: "
                    f"`aerie model verify --repair {self._name}@{revision}` mends it"
                )
        return files

    def _patterns(self) -> dict[str, str]:
        """Return which files are wanted, as the manifest has it."""
        given = {"include": list(self._options.include), "exclude": list(self._options.exclude)}
        return {name: json.dumps(patterns) for name, patterns in given.items() if patterns}

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
                    raise TryAgainError(f"{error} ({LIST_ATTEMPTS} attempts; {hint_for(self._place)})") from None
                wait = pause if error.after is None else min(error.after, _LONGEST_PAUSE)
                _log.warning("%s; asking again in %.0f s", error, wait)
                time.sleep(wait)
                pause *= 2
        raise AssertionError

    def _chosen(self, source: Source, listing: Listing) -> tuple[Offer, ...]:
        options = self._options
        if why := why_no_model(source.description, (offer.path for offer in listing.files)):
            raise _FetchError(why)
        files = tuple(
            offer
            for offer in sorted(listing.files, key=lambda offer: offer.path)
            if (not options.include or _matches(offer.path, options.include))
            and not _matches(offer.path, options.exclude)
        )
        left_out = {offer.path for offer in listing.files} - {offer.path for offer in files}
        self._leaves_out_weights = any(path.endswith(WEIGHTS) for path in left_out)
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
        if listing.revision is None:
            self._check_wanted(source)
        revision = listing.revision or Seen(self._model.own, source.description).revision(offers)
        if revision is not None:
            self._check_content(source, revision)
        chosen = {} if listing.revision is None else {**listing.chosen, **self._patterns()}
        if revision is not None and (files := self._published(revision, chosen)) is not None:
            self._check_same(revision, files, offers)
            if self._options.dry_run:
                return self._result(revision, files, "there already", 0)
            return self._there(revision, files)
        if self._options.dry_run:
            return self._dry(listing.revision or "", self._key(source, listing), offers)
        return self._download(source, listing.revision, self._key(source, listing), offers, chosen)

    def _check_wanted(self, source: Source) -> None:
        """Raise _FetchError where the content names the revision, and what is wanted is no such name."""
        wanted = self._options.revision
        if wanted is not None and not is_revision(wanted):
            raise _FetchError(
                f"{source.description} knows no revisions, and {wanted!r} was asked for: its content names it, by 40 "
                "hexadecimal digits. Leave --revision out, or give those that `aerie model list` shows where it has "
                "been fetched before"
            )

    def _check_content(self, source: Source, revision: str) -> None:
        """Raise _FetchError where a source holds another revision than the one that is wanted."""
        wanted = self._options.revision
        if wanted is not None and is_revision(wanted) and wanted != revision:
            self._kept.counts = None  # the same command does not go on from there
            raise _FetchError(
                f"{source.description} holds revision {revision}, and {wanted} was asked for: nothing was published. "
                "Leave --revision out to take what is there; of what was fetched nothing is fetched again"
            )

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

    def _dry(self, revision: str, key: str, offers: tuple[Offer, ...]) -> Result:
        """Say what is to come from the source; nothing is touched, so that what is there may still prove wrong."""
        staging = self._model.staging_path(key)
        ledger = Ledger(staging / "ledger", offers, boot_id(), only_look=True)
        donors = self._donors(offers)
        to_fetch = 0
        for number, offer in enumerate(offers):
            there = ledger.file_written(number) if _size(staging / "files" / offer.path) == offer.size else 0
            if not there and offer.sha256 and offer.sha256 in donors and _size(donors[offer.sha256]) == offer.size:
                there = offer.size
            to_fetch += offer.size - there
        self._check_space(to_fetch)
        return self._result(revision, offers, "not fetched", to_fetch)

    def _download(
        self, source: Source, revision: str | None, key: str, offers: tuple[Offer, ...], chosen: Mapping[str, str]
    ) -> Result:
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
        odd: tuple[str, ...] = ()
        if revision is None:
            Seen(self._model.own, source.description).remember(offers, named)
            self._check_content(source, named)
        if not self._model.is_published(named):
            odd = self._odd(source, staging / "files", offers, partly=bool(chosen) or self._leaves_out_weights)
            self._publish(source, staging, named, files, chosen)
        self._switch(named)
        shutil.rmtree(staging, ignore_errors=True)
        return replace(self._result(named, files, "published", counts.arrived_bytes), odd=odd)

    def _odd(self, source: Source, files: Path, offers: Sequence[Offer], *, partly: bool) -> tuple[str, ...]:
        """Return what the weights say against themselves, and tell it.

        Raises _FetchError where the source has no digests by which it is to be so, unless it was asked for.
        """
        odd = odd_headers(files, [offer.path for offer in offers], partly=partly)
        if not odd:
            return ()
        what = told(odd)
        proven = all(offer.sha256 or offer.git_sha1 for offer in offers)
        if is_incomplete(odd) and not proven and not self._options.as_it_is:
            self._kept.counts = None  # the same command ends here again
            raise _FetchError(
                f"of {source.description} nothing was published: {what}. Mend it there, then run this again: what was "
                "fetched is kept; --as-it-is publishes it all the same"
            )
        _log.warning("%s; published all the same%s", what, ", by the source's digests it is to be so" if proven else "")
        return tuple(fault.text for fault in odd)

    def _publish(
        self, source: Source, staging: Path, revision: str, files: tuple[File, ...], chosen: Mapping[str, str]
    ) -> None:
        manifest = Manifest(
            name=self._name,
            revision=revision,
            source=source.description,
            files=files,
            tool=f"aerie {aerie.__version__}",
            fetched=datetime.now(UTC).isoformat(timespec="seconds"),
            options={**source.options, **chosen},
        )
        try:
            self._model.publish(staging / "files", manifest, switch=False)
        except OSError as error:
            raise DiskError(
                f"{self._model.path}: {error.strerror or error}, while all was brought to the disk"
            ) from None

    def _check_space(self, needed: int) -> None:
        """Raise _FetchError where what is to come has no room, or nothing can be written there at all."""
        models = self._options.models_dir
        status = os.statvfs(self._model.path if self._model.path.exists() else models)
        if status.f_flag & os.ST_RDONLY:
            raise _FetchError(f"{models} is on a file system that is read-only: mount it to be written to")
        free = status.f_bavail * status.f_frsize
        if needed + RESERVE > free:
            raise _FetchError(
                f"{models} has {amount(free)} free, and {amount(needed)} are to come, with "
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


def _size(path: Path) -> int:
    """Return the bytes of a regular file, -1 where there is none."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else -1
    return -1


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, f"{each}*" if each.endswith("/") else each) for each in patterns)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP end what is done by an error, the first time; a second one ends the process."""

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise _InterruptedError(number)

    caught = [each for each in _ENDING if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, interrupt) for each in caught}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
