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

from aerie.gate.words import clock
from aerie.rehearsal import dynamic, kernels, software
from aerie.rehearsal.beside import low_priority, room_beside
from aerie.rehearsal.findings import Verdict, failed
from aerie.rehearsal.remembered import Remembered, digest_of
from aerie.rehearsal.report import Report, Told, end_of, lines_of
from aerie.rehearsal.static.checks import static_checks
from aerie.rehearsal.static.hardware import Hardware, by_name, identity, this_machine
from aerie.rehearsal.subject import Subject, UnreadableError, read_subject
from aerie.rehearsal.work_folder import work_folder

_TERMINATED = 128 + signal.SIGTERM


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
        rehearsal.write()  # also of one that was interrupted: what it had found is not lost
    return 1 if rehearsal.report.verdict == "failed" else 0


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
    for option, file in (
        ("--json", options.json and options.json != "-" and Path(options.json)),
        ("--junit", options.junit),
    ):
        if file and not file.absolute().parent.is_dir():
            raise UsageError(f"{option} {file}: {file.absolute().parent} is no directory")
    if options.work_dir:
        try:
            options.work_dir.mkdir(parents=True, exist_ok=True)
            taken = any(options.work_dir.iterdir())
        except OSError as error:
            raise UsageError(f"--work-dir {options.work_dir} cannot be used: {error.strerror}") from None
        if taken:
            raise UsageError(f"--work-dir {options.work_dir} is not empty: name one that is, or a new one")


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
        self._heading("Static checks")
        machine = this_machine()
        with _uncollected():
            subject = self._read(machine)
            digest = subject and self._digest(subject)
            if digest and self._options.if_changed:
                self.report.passed_before = self._remembered.passed_at(self.report.kind, digest)
            if subject and not self.report.passed_before:
                for finding in chain(software.findings(subject.setup), static_checks(subject)):
                    self._tell(Told("static", finding))
        if subject and not self.report.passed_before:
            self._beyond(subject, machine)
        self.report.is_complete = True
        is_news = self.report.verdict == "passed" and not self.report.passed_before
        if digest and is_news and self._options.cache_dir.is_dir():
            self._remembered.keep(self.report.kind, digest)

    def write(self) -> None:
        """Print the end of the report, and write its files."""
        self.report.seconds = time.monotonic() - self._began
        if self.report.diagnosis:
            self._print(f"\n{self.report.diagnosis.get('text', '')}")
        self._print("", *end_of(self.report))
        content = json.dumps(self.report.to_json(), indent=1, default=str) + "\n"
        if self._options.json == "-":
            sys.stdout.write(content)
        elif self._options.json:
            Path(self._options.json).write_text(content, encoding="utf-8")
        if self._options.junit:
            self._options.junit.write_text(self.report.to_junit(), encoding="utf-8")

    @property
    def _remembered(self) -> Remembered:
        return Remembered(self._options.cache_dir)

    def _read(self, machine: Hardware) -> Subject | None:
        options = self._options
        hardware = by_name(options.chip, options.count) if options.chip else machine
        try:
            subject = read_subject(options.words, options.target, options.drafter, hardware, weights=options.weights)
        except UnreadableError as error:
            self._tell(Told("static", error.finding))
            return None
        self.report.target = str(subject.setup.target.directory)
        drafter = subject.setup.drafter
        self.report.drafter = str(drafter.directory) if drafter else None
        return subject

    def _digest(self, subject: Subject) -> str | None:
        try:
            return digest_of(subject, self._options.asked, identity(), os.environ)
        except OSError as error:
            text = f"{error.filename} cannot be read: {error.strerror}"
            self._tell(Told("static", failed("target files", text, "it must be readable by this user")))
            return None

    def _beyond(self, subject: Subject, machine: Hardware) -> None:
        """Compile and start, unless the static checks have found that it would fail."""
        if self.report.verdict == "failed":
            self.report.not_proven = ["all that an engine shows: static checks failed, so none was started"]
            return
        if self._options.static:
            self.report.not_proven = ["all that an engine shows: only the static checks were asked for"]
            return
        self._heading("Kernels")
        began = time.monotonic()
        self._tell(Told("kernels", kernels.compile_decode(subject.setup), time.monotonic() - began))
        self._heading(f"Engine: the whole start-up with a shrunken pair, on {machine.name}")
        if self._options.beside:
            low_priority()
            if no_room := room_beside(machine):
                self._tell(Told(dynamic.SECTION, no_room))
                self.report.kind = "static"
                self.report.not_proven = ["all that an engine shows: there is no room for one beside the service"]
                return
        if self.report.verdict == "failed":
            return
        try:
            with work_folder(self._options.work_dir, self._options.cache_dir) as folder:
                dynamic.rehearse_engine(
                    subject, machine, folder, self.report, self._tell, self._say, beside=self._options.beside
                )
        except OSError as error:
            text = f"{error.filename or 'the work directory'}: {error.strerror}"
            self._tell(Told(dynamic.SECTION, failed("work directory", text, "make room, or name another: --work-dir")))

    def _tell(self, told: Told) -> None:
        if told.finding.verdict is Verdict.FAILED and told.finding.check in self._options.accept:
            accepted = f"{told.finding.text} (accepted with --accept)"
            told = replace(told, finding=replace(told.finding, verdict=Verdict.WARNED, text=accepted))
        self.report.told.append(told)
        self._print(*lines_of(told))

    def _say(self, progress: str) -> None:
        self._print(f"  .... {clock(time.monotonic() - self._began):>5} {progress}")

    def _heading(self, text: str) -> None:
        self._print(text)

    def _print(self, *lines: str) -> None:
        for line in lines:
            print(line, file=self._out, flush=True)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage for a while: walking hundreds of thousands of tensors again and again doubles the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
