"""The diagnosis: what failed, why, and what to do; drawn from the root cause, known signatures and outside evidence."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from aerie.diagnosis.evidence import Evidence
from aerie.diagnosis.root_cause import RootCause
from aerie.diagnosis.signatures import Kind, Severity, Signature, Where

WIDTH = 100
"""Columns of the text."""
RULE = "-" * WIDTH
HANDBOOK = "docs/troubleshooting.md"
# The text's parts, by which `reported` reads it again.
ROOT_CAUSE, WHY, WHAT_TO_DO, SEEN_OUTSIDE, SEE = (
    "Root cause",
    "Why",
    "What to do",
    "Seen outside the engine's output",
    "See",
)

_EVIDENCE_SHOWN = 6
_ROOT_LINES = 12
_LAST_LINES = 4  # of which the last ones, where a compiler and a library tell the reason
_CHAIN_LINES = 3  # of each exception that followed from the root cause
# Which field got which object: noise to everybody but pydantic.
_PYDANTIC_DETAIL = re.compile(r" ?\[type=\w+, input_value=.*?, input_type=\w+\]$", re.MULTILINE)
# What torch explains of its allocator whenever a GPU is full.
_ALLOCATOR_DETAIL = re.compile(r" Of the allocated memory .*")
_GPU_WORDS = re.compile(r"CUDA|cuda|NCCL|nccl|cuBLAS|CUBLAS|NVML|Watchdog|device-side|Triton Error")
_ARGUMENTS = re.compile(r"[\w ./-]{1,80}: error: |.*ValidationError: \d+ validation error")
# What Python and vLLM themselves refuse, whatever the message goes on to name.
_OWN_REASON = re.compile(
    rf"{_ARGUMENTS.pattern}|(?:\w+\.)*(?:Value|Type|Key|Index|Attribute|NotImplemented|Import|ModuleNotFound|Validation)Error\b"
)
# A full GPU says so; the device is well.
_FULL = re.compile(r"(?:\w+\.)*OutOfMemoryError\b|[^\n]*\bCUDA[^\n]* out of memory")
# Who holds a process up is no device.
_HELD_UP = re.compile(r"the engine hangs: .* is stopped")
_COMMAND = re.compile(r"`[^` \n]{1,40}(?: [^` \n]{1,40}){2,12}`")  # of three words or more
_EXIT_CODE = re.compile(r"exit code:? -?\d")
_KILLED = re.compile(r"exit code: -9\b|died with exit code -9\b|\bKilled\b|SIGKILL")


@dataclass(frozen=True)
class End:
    """What is known about an engine's end besides its own words."""

    words: str | None = None
    """Such as "vllm serve ended with exit code 1"."""
    kind: Kind | None = None
    """Where whoever saw it end knows: HUNG, or KILLED for a process that died, unless it said why itself."""
    evidence: tuple[Evidence, ...] = ()
    silent: bool = False
    """No process said why."""


@dataclass(frozen=True)
class Diagnosis:
    """Why an engine failed and what to do about it."""

    signature: str | None
    title: str
    cause: str
    remedy: str
    kind: Kind
    severity: Severity
    source: str
    root: RootCause | None
    evidence: tuple[str, ...]
    known: bool

    def to_json(self) -> dict[str, Any]:
        """Return it in the form of the state's `diagnosis`."""
        fields = ("signature", "known", "title", "cause", "remedy", "kind", "severity", "source")
        written: dict[str, Any] = {name: getattr(self, name) for name in fields}
        written |= {"kind": str(self.kind), "severity": str(self.severity)}
        unwritten = {"frames", "beside"}
        root = self.root and {name: value for name, value in asdict(self.root).items() if name not in unwritten}
        if root:
            root |= {"chain": list(root["chain"]), "excerpt": list(root["excerpt"])}
        return {**written, "root": root, "evidence": list(self.evidence)}

    def text(self) -> str:
        """Return what an operator reads last: plain text of at most `WIDTH` columns, without a newline at its end."""
        blocks = [[RULE, *wrap(f"DIAGNOSIS: {self.title} ({self.kind})", "", "  "), RULE]]
        if self.root:
            blocks += [_root(self.root)]
        blocks += [_block(WHY, self.cause), _block(WHAT_TO_DO, self.remedy)]
        if self.evidence:
            blocks += [[SEEN_OUTSIDE, *_listed(self.evidence)]]
        if self.signature:
            blocks += [[SEE, *wrap(f"{HANDBOOK}#{self.signature}", "  ", "  "), *wrap(self.source, "  ", "  ")]]
        text = "\n\n".join("\n".join(block) for block in blocks) + f"\n{RULE}"
        # What a log holds besides text must not reach a terminal.
        return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)


def conclude(root: RootCause | None, end: End, known: Sequence[Signature], seen: Iterable[str]) -> Diagnosis:
    """Draw the diagnosis; `seen` are the ids of signatures whose line was in the log."""
    held_up = any(_HELD_UP.search(one.text) for one in end.evidence)
    may_explain = (one for one in end.evidence if one.kind and not (held_up and one.source == "kernel"))
    explaining = tuple(one for one in may_explain if _explains(one, root, end))
    told = tuple(map(str, end.evidence))
    signature = _match(known, root, frozenset(seen), explaining)
    if signature and signature.kind is Kind.CRASH and end.kind is Kind.KILLED and end.silent and not _says_how(root):
        signature = None  # only what the others noticed of a process that was seen to die
    if signature:
        return Diagnosis(
            signature=signature.id,
            title=signature.title,
            cause=signature.cause,
            remedy=signature.remedy,
            kind=signature.kind,
            severity=signature.severity,
            source=signature.source,
            root=root,
            evidence=told,
            known=signature.known,
        )
    kind = _kind(root, end, explaining)
    said = _unknown(kind, end, explaining)
    return Diagnosis(None, said.title, said.cause, said.remedy, kind, Severity.FATAL, "", root, told, known=False)


def _explains(evidence: Evidence, root: RootCause | None, end: End) -> bool:
    """Tell whether it may be the reason: an exception of Python's own explains itself, a lost GPU shows as CUDA's."""
    if end.silent or root is None:
        return True
    if _OWN_REASON.match(root.text) or _FULL.match(root.text):
        return False
    return evidence.kind is Kind.HARDWARE and any(_GPU_WORDS.search(text) for text in (root.text, *root.chain))


def _match(
    known: Sequence[Signature], root: RootCause | None, seen: frozenset[str], explaining: Sequence[Evidence]
) -> Signature | None:
    words = "\n".join((root.text, *root.chain)) if root else ""
    outside = "\n".join(one.text for one in explaining)
    # A device that broke, and a process killed for memory, explain what the log can only complain of.
    order = sorted(known, key=lambda signature: signature.where is not Where.EVIDENCE)
    for signature in order:
        if signature.severity is not Severity.FATAL:
            continue
        match signature.where:
            case Where.CAUSE if signature.match.search(words) and _was_in(signature, root):
                return signature
            case Where.LINE if signature.id in seen:
                return signature
            case Where.EVIDENCE if signature.match.search(outside):
                return signature
    return None


def _was_in(signature: Signature, root: RootCause | None) -> bool:
    return signature.frame is None or any(signature.frame.search(frame) for frame in (root.frames if root else ()))


def _says_how(root: RootCause | None) -> bool:
    """Tell whether a line about another process has its exit code, which is a signal's where it is negative."""
    return root is not None and _EXIT_CODE.search(root.text) is not None


def _kind(root: RootCause | None, end: End, explaining: Sequence[Evidence]) -> Kind:
    kinds = {one.kind for one in explaining}
    for kind in (Kind.HARDWARE, Kind.MEMORY):
        if kind in kinds:
            return kind
    if end.kind is Kind.HUNG or (end.kind is Kind.KILLED and end.silent):
        return end.kind
    if root and _ARGUMENTS.match(root.text):
        return Kind.CONFIGURATION
    if end.silent and _KILLED.search(f"{root.text if root else ''} {end.words or ''}"):
        return Kind.KILLED
    return Kind.CRASH


class _Words(NamedTuple):
    """What is said where no signature fits."""

    title: str
    cause: str
    remedy: str


_UNKNOWN = {
    Kind.HARDWARE: _Words(
        "The hardware or its driver failed",
        "The kernel reported it at the time of the end: {meaning}.",
        "Look at the kernel's lines below and at `nvidia-smi -q`; reset or replace the GPU before the next start.",
    ),
    Kind.MEMORY: _Words(
        "The kernel killed the engine for lack of memory",
        "No process said why it ended, and memory ran out at that time: {meaning}.",
        "Give the container or the host more memory, or let the engine take less; `dmesg` lists who held how much.",
    ),
    Kind.HUNG: _Words(
        "The engine hangs, and the cause is not known",
        "Nothing moved any more, and no process said why.{end}",
        "Look at what the processes wait for (`py-spy dump --pid PID`), at the kernel's log and at `nvidia-smi`.",
    ),
    Kind.KILLED: _Words(
        "A process of the engine was killed from outside",
        "It could not say anything.{end} A person, a kernel short of memory or an orchestrator sends such a signal.",
        "Look for an out-of-memory kill in `dmesg` and in the container's limits, then for who else may have sent it.",
    ),
    Kind.CONFIGURATION: _Words(
        "vLLM refuses its configuration",
        "vLLM says in the root cause above what it refuses. The message is not among those that are known here.",
        "Correct what it names in the engine's configuration file or arguments, then start again.",
    ),
    Kind.CRASH: _Words(
        "The engine crashed, and the cause is not known",
        "The root cause above was picked from the log. It is not among the failures that are known here.",
        "Start from the file and line of the root cause; search vLLM's issues for its message.",
    ),
}
_SILENT = _Words(
    "The engine ended, and nothing says why",
    "No process wrote an error that tells the cause.{end} The cause is not known.",
    "Look at the last lines of the log, and at the kernel's log (`dmesg`) for the time of the end.",
)


def _unknown(kind: Kind, end: End, explaining: Sequence[Evidence]) -> _Words:
    said = _SILENT if kind is Kind.CRASH and end.silent else _UNKNOWN[kind]
    meaning = next((one.meaning for one in explaining if one.kind is kind), "")
    how = f" It is known that {end.words}." if end.words else ""
    return said._replace(cause=said.cause.format(meaning=meaning, end=how))


def _root(root: RootCause) -> list[str]:
    who = f"{root.process} (pid {root.pid})" if root.process and root.pid else root.process
    where = " at ".join(filter(None, (who, root.place)))
    lines = [ROOT_CAUSE]
    if where:
        lines += wrap(f"in {where}", "  ", "    ")
    if root.innermost and root.innermost != root.place:
        lines += wrap(f"raised in {root.innermost}", "  ", "    ")
    said = _ALLOCATOR_DETAIL.sub("", _PYDANTIC_DETAIL.sub("", root.text))
    lines += _quoted([wrap(line, "  > ", "  > ") for line in said.splitlines()])
    for chained in root.chain[1:]:
        label = "seen" if chained in root.beside else "then"
        lines += wrap(f"{label}: {chained.strip()}", "  ", "    ")[:_CHAIN_LINES]
    return lines


def _quoted(lines: list[list[str]]) -> list[str]:
    """Shorten a long message in its middle: the head says what failed, and the last lines mostly why."""
    whole = [part for line in lines for part in line]
    if len(whole) <= _ROOT_LINES:
        return whole
    last: list[str] = []
    for line in reversed(lines[1:]):
        if len(line) + len(last) > _LAST_LINES:
            break
        last = line + last
    return [*whole[: _ROOT_LINES - len(last)], "  > ...", *last]


def wrap(text: str, first: str, further: str) -> list[str]:
    """Break a text into lines of at most `WIDTH` columns; a command between backquotes stays whole, to be copied."""
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(whole, WIDTH, initial_indent=first, subsequent_indent=further, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _block(title: str, text: str) -> list[str]:
    return [title, *wrap(text, "  ", "  ")]


def _listed(texts: Sequence[str]) -> list[str]:
    shown = [line for text in texts[:_EVIDENCE_SHOWN] for line in wrap(text, "  - ", "    ")]
    hidden = len(texts) - _EVIDENCE_SHOWN
    return [*shown, f"  - and {hidden} more"] if hidden > 0 else shown
