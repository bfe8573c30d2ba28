"""What only an engine shows: a shrunken pair is written, started with the operator's arguments, asked and stopped."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from aerie.checkpoint.config import ConfigError, read_target
from aerie.checkpoint.shrink import Profile
from aerie.engine_arguments import read_arguments
from aerie.gate.judge import Judgement
from aerie.gate.judge import Verdict as Judged
from aerie.rehearsal import backends, steps
from aerie.rehearsal.engine import Engine, free_port
from aerie.rehearsal.findings import Finding, Verdict, failed, passed, skipped
from aerie.rehearsal.overrides import engine_words, overrides
from aerie.rehearsal.pair import Pair, TokenizerError, write_pair
from aerie.rehearsal.report import Report, Told
from aerie.rehearsal.service import Service
from aerie.rehearsal.static.checks import memory_plan
from aerie.rehearsal.static.hardware import Hardware
from aerie.rehearsal.static.memory import measured, will_fit
from aerie.rehearsal.static.settings import settings_from
from aerie.rehearsal.subject import Subject
from aerie.startup.lines import parse

SECTION = "engine"
_GB = 1e9
_DIES_WITHIN = 30.0
"""Seconds from the first answer that an engine owes to the supervisor's word on why."""
_MEMORY = "memory"
# A CPU has none of the host's affinities to bind to, and needs little of its memory. The vision tower would be compiled
# with `enforce-eager`, too, for half a minute.
_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip
_ALWAYS = (
    "the weights themselves, and how long they take to load",
    "the drafter's acceptance, which depends on its real weights",
    "memory under load for hours: see the plan among the static checks",
)
NOT_PROVEN: Mapping[Profile, tuple[str, ...]] = {
    Profile.GPU: (
        "layers and experts beyond those of the shrunken pair: their kernels and shapes are the same",
        *_ALWAYS,
    ),
    Profile.CPU: (
        "CUDA: no kernel but the decode kernel, which was compiled and not run, no CUDA graph, no backend of the GPUs",
        "NCCL, and whatever needs more than one rank: tensor, pipeline and decode context parallelism",
        "INT4 experts: the shrunken pair is not quantised, for no kernel runs them on this CPU",
        "an FP8 KV cache, and memory: a CPU has another plan",
        "chunked prefill with MLA: a CPU takes prompts whole",
        "every width and number that stands above as smaller than the real pair's",
        *_ALWAYS,
    ),
}


def rehearse_engine(
    subject: Subject,
    machine: Hardware,
    folder: Path,
    report: Report,
    tell: Callable[[Told], None],
    say: Callable[[str], None],
    *,
    beside: bool,
) -> None:
    """Tell what each step comes to; `say` gets a line of progress. Overrides and changes go to the report."""
    profile = Profile.GPU if machine.chip else Profile.CPU
    report.profile, report.not_proven = profile, ["all that an engine shows: it did not get that far"]
    began = time.monotonic()
    say("writing the shrunken pair")
    pair = _write(subject, folder, profile, lambda finding: tell(Told(SECTION, finding, time.monotonic() - began)))
    if pair is None:
        return
    report.changes = pair.changes
    changed = overrides(
        subject.setup.settings, pair.drafter, free_port(), subject.setup.longest, profile, machine if beside else None
    )
    report.overrides = list(changed)
    words = engine_words(subject.words, pair.target, report.overrides, folder)
    environment = {**(_CPU_ENVIRONMENT if profile is Profile.CPU else {}), **os.environ}
    with Engine(words, folder, environment) as engine:
        began = time.monotonic()
        ready = _start(engine, say)
        tell(Told(SECTION, ready, time.monotonic() - began))
        if ready.verdict is not Verdict.FAILED:
            for finding in backends.compare(subject.setup, machine, environment, parse(engine.text())):
                tell(Told(SECTION, finding))
            if profile is Profile.GPU and not beside:
                for finding in _memory(subject, machine, engine, read_target(pair.target).layers):
                    tell(Told(SECTION, finding))
            settings = settings_from(read_arguments(words), machine)
            longest = settings.longest if settings.longest and settings.longest > 0 else subject.setup.target.positions
            pictures = subject.setup.target.is_multimodal and not settings.flag("language-model-only")
            service = Service(engine.url, engine.key, pair, settings, longest, profile, pictures)
            report.not_proven = NOT_PROVEN[profile]
            for told in _ask(engine, service, say):
                tell(told)
        report.diagnosis = engine.diagnosis()
        # One that did not become ready is ending by itself, and how it does proves nothing.
        if ready.verdict is not Verdict.FAILED and not engine.ended():
            began = time.monotonic()
            tell(Told(SECTION, _stop(engine), time.monotonic() - began))


def _write(subject: Subject, folder: Path, profile: Profile, tell: Callable[[Finding], None]) -> Pair | None:
    setup = subject.setup
    present = subject.drafter_weights.tensors.keys() if subject.drafter_weights else None
    stages, named = setup.settings.pipeline_parallel, setup.settings.text("tokenizer")
    try:
        pair = write_pair(
            folder, setup.target, setup.drafter, present, profile, stages, Path(named) if named else None,
            trusted=bool(setup.settings.flag("trust-remote-code")),
        )  # fmt: skip
    except TokenizerError as error:
        remedy = "fetch the tokenizer's files again; where its code is needed and wanted, set trust-remote-code: true"
        tell(failed("tokenizer", str(error), remedy))
    except (ConfigError, ValueError) as error:
        tell(failed("shrunken pair", str(error), "this pair cannot be shrunken: --static still checks it"))
    except OSError as error:
        text = f"{error.filename or folder} cannot be written: {error.strerror}"
        tell(failed("shrunken pair", text, "make room, or name another place with --work-dir"))
    else:
        size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
        tokenizer = "the target's tokenizer" if pair.has_own_tokenizer else "a stand-in tokenizer"
        tell(passed("shrunken pair", f"{size / _GB:.1f} GB of scripted weights, with {tokenizer}"))
        return pair
    return None


def _start(engine: Engine, say: Callable[[str], None]) -> Finding:
    judgement: Judgement = engine.wait(say)
    if judgement.verdict is Judged.READY:
        return passed("start", "loaded, profiled, warmed up, and answered its first completion")
    return _told("start", judgement.diagnosis) or Finding(
        "start",
        Verdict.FAILED,
        f"the engine did not become ready: {judgement.step}. Its log ends with",
        "read the whole of it, which --work-dir keeps",
        details=tuple(engine.last_words().splitlines()),
    )


def _memory(subject: Subject, machine: Hardware, engine: Engine, layers: int) -> Iterator[Finding]:
    """Yield the plan again, with what this start measured in place of what was assumed."""
    if subject.setup.hardware != machine:
        yield skipped(_MEMORY, f"the plan is one of {subject.setup.hardware.name}")
        return
    found = measured(memory_plan(subject), engine.text().splitlines(), layers)
    if found is None:
        yield skipped(_MEMORY, "the engine logged nothing of it")
        return
    yield from will_fit(found)


def _told(check: str, diagnosis: Mapping[str, object] | None) -> Finding | None:
    if not diagnosis:
        return None
    root = diagnosis.get("root")
    said = f": {str(root['text']).partition(chr(10))[0]}" if isinstance(root, dict) else ""
    text = f"{diagnosis['title']}{said}. {diagnosis['cause']}"
    return failed(check, text, str(diagnosis["remedy"]), str(diagnosis["source"] or ""))


def _ask(engine: Engine, service: Service, say: Callable[[str], None]) -> Iterator[Told]:
    for check in steps.STEPS:
        say(check)
        began = time.monotonic()
        for finding in steps.run(check, service):
            yield Told(SECTION, finding, time.monotonic() - began)
        # One that dies is looked at by the supervisor before that ends, too.
        if engine.ended() or (not service.is_healthy() and engine.ended(_DIES_WITHIN)):
            died = _told("engine", engine.diagnosis()) or failed(
                "engine", "it ended while it was asked", engine.last_words()
            )
            yield Told(SECTION, died)
            return


def _stop(engine: Engine) -> Finding:
    check = "stop"
    code, left = engine.stop()
    if left:
        return failed(check, f"{len(left)} processes were left behind", "they are killed now; read the engine's log")
    if code is None:
        return failed(check, "it did not end in time", "it is killed now; read the engine's log")
    if code != 0:
        return failed(check, f"it ended with exit code {code}", "read the engine's log")
    return passed(check, "it drained, ended with exit code 0, and left no process behind")
