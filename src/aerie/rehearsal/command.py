"""`aerie rehearse`: the static checks, then the whole start-up with a shrunken copy of the pair."""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import NoReturn

from aerie.cache.names import model_of
from aerie.gate.words import clock
from aerie.rehearsal import dynamic, kernels, software
from aerie.rehearsal.beside import low_priority, room_beside
from aerie.rehearsal.findings import Verdict, failed, warned
from aerie.rehearsal.remembered import Remembered, digest_of
from aerie.rehearsal.report import Report, Told, end_of, lines_of
from aerie.rehearsal.static.checks import static_checks
from aerie.rehearsal.static.hardware import Hardware, by_name, identity, this_machine
from aerie.rehearsal.subject import Subject, UnreadableError, read_subject
from aerie.rehearsal.work_folder import work_folder

_TERMINATED = 128 + signal.SIGTERM
_OF_ENGINE = "whether vLLM knows each option and value, and all else that an engine shows"
_NEEDED = frozenset({"target config", "drafter config"})
"""Checks without whose pass nothing else can be looked at: they cannot be accepted."""


@dataclass(frozen=True)
class Options:
    """What `aerie rehearse` was told; None for what is the arguments' own, or this machine's."""

    words: tuple[str, ...]
    target: Path | None
    drafter: Path | None
    static: bool
    weights: bool
    chip: str | None
    count: int | None
    beside: bool
    if_changed: bool
    accept: tuple[str, ...]
    work_dir: Path | None
    cache_dir: Path
    json: str | None
    """A file, or - for stdout."""
    junit: Path | None

    @property
    def kind(self) -> str:
        """Which rehearsal it is, in the report."""
        return "static" if self.static else "beside" if self.beside else "full"

    @property
    def files(self) -> list[tuple[str, Path]]:
        """The files to write, with their options."""
        report = [("--json", Path(self.json))] if self.json and self.json != "-" else []
        return report + ([("--junit", self.junit)] if self.junit else [])

    @property
    def asked(self) -> list[str]:
        """All of them but the kind that decide what a pass is worth."""
        return ["with weights" if self.weights else "without weights", *sorted(self.accept)]


class UsageError(Exception):
    """Options that make no sense; the message says which, and what to give."""


def rehearse(options: Options) -> int:
    """Rehearse, print the report as it goes, and return 0 where it passed or 1; raises UsageError before anything."""
    _check(options)
    signal.signal(signal.SIGTERM, _terminated)
    rehearsal = _Rehearsal(options)
    try:
        rehearsal.run()
    finally:
        is_written = rehearsal.write()  # also of one that was interrupted: what it had found is not lost
    return 1 if rehearsal.report.verdict == "failed" or not is_written else 0


def _check(options: Options) -> None:
    if not options.target and not options.words:
        raise UsageError("give --target DIR, or --config FILE or arguments after `--` that name the model")
    if options.static and options.beside:
        raise UsageError("--static starts no engine, so --beside has no meaning with it: give one of them")
    if options.count and not options.chip:
        raise UsageError("--gpus counts those of --chip: give --chip, too")
    try:
        by_name(options.chip, options.count) if options.chip else None
    except ValueError as error:
        raise UsageError(f"--chip {options.chip}: {error}") from None
    if options.junit and options.json and options.junit.absolute() == Path(options.json).absolute():
        raise UsageError(f"--json and --junit both name {options.junit}: give two files")
    for option, file in options.files:
        try:
            file.open("a").close()
        except OSError as error:
            raise UsageError(f"{option} {file} cannot be written: {error.strerror}") from None
    if options.work_dir:
        _make(options.work_dir)


def _make(directory: Path) -> None:
    """Make the work directory, or take an empty one."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken = any(directory.iterdir())
    except OSError as error:
        raise UsageError(f"--work-dir {directory} cannot be used: {error.strerror}") from None
    if taken:
        raise UsageError(f"--work-dir {directory} is not empty: name one that is, or a new one")


def _terminated(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(_TERMINATED)  # through every `with`, so that nothing is left behind


class _Rehearsal:
    def __init__(self, options: Options) -> None:
        self._options = options
        self._out = sys.stderr if options.json == "-" else sys.stdout
        self._began = time.monotonic()
        self.report = Report(options.kind, str(options.target or ""), str(options.drafter) if options.drafter else None)

    def run(self) -> None:
        """Do it all; findings go to the report, and are printed as they come."""
        machine = this_machine()
        with _uncollected():
            subject = self._read(machine)
            digest = subject and self._digest(subject)
            if digest and self._options.if_changed:
                self.report.passed_before = self._remembered.passed_at(self.report.kind, digest)
            if subject and not self.report.passed_before:
                for finding in chain(software.findings(subject.setup), static_checks(subject)):
                    self._tell(Told("static", finding), is_acceptable=finding.check not in _NEEDED)
        if subject and not self.report.passed_before:
            self._beyond(subject, machine)
            self._unknown()
        self.report.is_complete = True
        is_news = self.report.verdict == "passed" and not self.report.passed_before
        if digest and is_news and self._options.cache_dir.is_dir():
            self._remembered.keep(self.report.kind, digest)

    def write(self) -> bool:
        """Write the report's files, and print its end; return whether all could be written."""
        self.report.seconds = time.monotonic() - self._began
        content = json.dumps(self.report.to_json(), indent=1, default=str) + "\n"
        if self._options.json == "-":
            sys.stdout.write(content)
        written = True
        for option, file in self._options.files:
            try:
                text = content if option == "--json" else self.report.to_junit()
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                print(f"aerie rehearse: {option} {file} cannot be written: {error.strerror}", file=sys.stderr)
                written = False
        if self.report.diagnosis:
            self._print("", *str(self.report.diagnosis.get("text", "")).splitlines())
        self._print("", *end_of(self.report))
        return written

    @property
    def _remembered(self) -> Remembered:
        return Remembered(self._options.cache_dir)

    def _read(self, machine: Hardware) -> Subject | None:
        options = self._options
        hardware = by_name(options.chip, options.count) if options.chip else machine
        try:
            subject = read_subject(options.words, options.target, options.drafter, hardware, weights=options.weights)
        except UnreadableError as error:
            self._heading("Static checks")
            for finding in error.findings:
                self._tell(Told("static", finding), is_acceptable=False)
            return None
        self.report.target = str(subject.setup.target.directory)
        drafter = subject.setup.drafter
        self.report.drafter = str(drafter.directory) if drafter else None
        self.report.hardware, self.report.arguments = hardware, subject.words
        names = " with ".join(model_of(Path(each)) for each in (self.report.target, self.report.drafter) if each)
        self._heading(f"{names}, planned for {hardware.count} x {hardware.words}")
        self._heading("Static checks")
        return subject

    def _digest(self, subject: Subject) -> str | None:
        """Return None where a file cannot be read: then nothing says that it is as it was."""
        try:
            return digest_of(subject, self._options.asked, identity(), os.environ)
        except OSError:
            return None

    def _beyond(self, subject: Subject, machine: Hardware) -> None:
        """Compile and start, unless the static checks have found that it would fail."""
        if self._options.static:
            self.report.not_proven = [f"{_OF_ENGINE}: only the static checks were asked for"]
            return
        if self.report.verdict == "failed":
            self.report.not_proven = [f"{_OF_ENGINE}: static checks failed, so none was started"]
            return
        if self._options.beside:
            low_priority()
            if no_room := room_beside():
                self._tell(Told(dynamic.SECTION, no_room))
                self.report.kind = "static"
                self.report.not_proven = [f"{_OF_ENGINE}: there is no room for one beside the service"]
                return
        self._heading("Kernels")
        began = time.monotonic()
        self._tell(Told("kernels", kernels.compile_decode(subject.setup), time.monotonic() - began))
        if self.report.verdict == "failed":
            self.report.not_proven = [f"{_OF_ENGINE}: the kernels do not fit, so none was started"]
            return
        self._heading(f"Engine: the whole start-up with a shrunken pair, on {machine.name}")
        try:
            with work_folder(self._options.work_dir, self._options.cache_dir) as folder:
                dynamic.rehearse_engine(
                    subject, machine, folder, self.report, self._tell, self._say, beside=self._options.beside
                )
        except OSError as error:
            text = f"{error.filename or 'the work directory'}: {error.strerror}"
            self._tell(Told(dynamic.SECTION, failed("work directory", text, "make room, or name another: --work-dir")))

    def _tell(self, told: Told, *, is_acceptable: bool = True) -> None:
        finding = told.finding
        if is_acceptable and finding.verdict is Verdict.FAILED and finding.check in self._options.accept:
            accepted = replace(finding, verdict=Verdict.WARNED, text=f"{finding.text} (accepted with --accept)")
            told = replace(told, finding=accepted)
        self.report.told.append(told)
        self._print(*lines_of(told))

    def _unknown(self) -> None:
        """Tell of what is to be accepted and was not looked at, maybe for its name."""
        for check in sorted(set(self._options.accept) - {each.finding.check for each in self.report.told}):
            text = f"no check of this rehearsal is called {check!r}"
            self._tell(Told("static", warned("--accept", text, "give the name that stands in the report")))

    def _say(self, progress: str) -> None:
        self._print(f"  .... {clock(time.monotonic() - self._began):>5} {progress}")

    def _heading(self, text: str) -> None:
        self._print(text)

    def _print(self, *lines: str) -> None:
        try:
            for line in lines:
                print(line, file=self._out, flush=True)
        except OSError:  # nobody reads on, or the disk is full: the rehearsal goes on for its report and exit code
            # The descriptor and not the file: what is left in its buffer would fail once more when this process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage for a while: walking hundreds of thousands of tensors again and again doubles the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
