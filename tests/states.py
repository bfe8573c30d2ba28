"""Example states, one for each thing that their readers must show, made by what makes the real ones."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import aerie
from aerie.diagnosis import Diagnosis, Evidence, Kind, RootCause
from aerie.diagnosis.diagnosis import End, conclude
from aerie.diagnosis.signatures import signatures
from aerie.engine_metrics import Serving, Speculation
from aerie.startup import Phase as StartedPhase
from aerie.startup import Start, StartPhase
from aerie.supervisor.crash import reason, shown
from aerie.supervisor.state import BACK_OFF, Exit, Phase, State, to_json

VERSIONS = {"aerie": aerie.__version__, "vllm": "0.32.0"}
TOOK = dict(zip(StartPhase, (9, 14, 8, 812, 21, 38, 96, 12, 24, 31, 3, 2), strict=True))
"""Seconds of each phase, as a start of eight ranks takes them."""

KNOWN = conclude(
    RootCause(
        text="ValidationError: 1 validation error for SpeculativeConfig\n  Value error, eagle3 is only supported for "
        "['llama', 'qwen', 'minicpm', 'gpt_oss'] models. Got "
        "self.target_model_config.hf_text_config.model_type='kimi_k2'",
        process="APIServer",
        pid=21258,
        file="vllm/engine/arg_utils.py",
        line=1443,
        function="create_speculative_config",
        innermost="pydantic/_internal/_dataclasses.py:121 in __init__",
        chain=(
            "ValueError: eagle3 is only supported for ['llama', 'qwen', 'minicpm', 'gpt_oss'] models.",
            "ValidationError: 1 validation error for SpeculativeConfig",
        ),
        excerpt=(
            '  File "vllm/engine/arg_utils.py", line 1443, in create_speculative_config',
            "    return SpeculativeConfig(**self.speculative_config)",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig",
            "  Value error, eagle3 is only supported for ['llama', 'qwen', 'minicpm', 'gpt_oss'] models.",
        ),
    ),
    End("vllm serve ended with exit code 1"),
    signatures(),
    (),
)

UNKNOWN = conclude(
    RootCause(
        text="IndexError: index 7168 is out of bounds for dimension 1 with size 7168",
        process="Worker_TP3",
        pid=412,
        file="vllm/model_executor/models/llama_eagle3.py",
        line=217,
        function="load_weights",
        innermost="torch/_tensor.py:1121 in __getitem__",
        chain=(),
        excerpt=(
            '  File "vllm/model_executor/models/llama_eagle3.py", line 217, in load_weights',
            "IndexError: index 7168 is out of bounds for dimension 1 with size 7168",
        ),
    ),
    End(
        "vllm serve ended with exit code 1",
        evidence=(
            Evidence(
                "kernel",
                None,
                "pcieport 0000:40:01.1: AER: Corrected error message received from 0000:41:00.0",
                meaning="PCIe error, corrected",
            ),
        ),
    ),
    signatures(),
    (),
)

KILLED = conclude(
    RootCause(
        text="vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for "
        "the root cause.",
        process="APIServer",
        pid=12,
        file="vllm/v1/engine/core_client.py",
        line=1235,
        function="get_output_async",
        innermost="vllm/v1/engine/core_client.py:1235 in get_output_async",
        chain=(),
        excerpt=("    raise self._format_exception(outputs) from None",),
    ),
    End("VLLM::EngineCore (pid 77) died", Kind.KILLED, silent=True),
    signatures(),
    (),
)

OUT_OF_MEMORY = conclude(
    None,
    End(
        "VLLM::Worker_TP3 (pid 412) died",
        Kind.KILLED,
        (
            Evidence(
                "kernel",
                None,
                "Memory cgroup out of memory: Killed process 412 (VLLM::Worker_TP3)",
                kind=Kind.MEMORY,
                meaning="the container's memory limit was reached",
            ),
        ),
        silent=True,
    ),
    signatures(),
    (),
)


class Example:
    """The examples, as they are at one moment, `now`."""

    def __init__(self, now: datetime | None = None) -> None:
        self.now = (now or datetime.now(UTC)).replace(microsecond=0)

    def ago(self, seconds: float) -> datetime:
        return self.now - timedelta(seconds=seconds)

    def start(self, reached: StartPhase, within: float | None = None, detail: str = "", **changes: Any) -> Start:
        """Return a start that is `within` (0 to 1, None where that is not known) through the phase `reached`."""
        now = self.now.timestamp()
        ends = dict(zip(TOOK, accumulate(TOOK.values()), strict=True))
        whole, before = ends[StartPhase.ANSWERING], ends[reached] - TOOK[reached]
        elapsed = before + TOOK[reached] * (within or 0.3)
        began = now - elapsed
        phases = [
            StartedPhase(name, began + end - TOOK[name], began + end, 1.0) if end <= before else StartedPhase(name)
            for name, end in ends.items()
        ]
        phases[list(TOOK).index(reached)] = StartedPhase(reached, began + before, None, within, detail)
        start = Start(
            phases=tuple(phases),
            phase=reached,
            fraction=elapsed / whole,
            began=began,
            ended=None,
            eta=began + whole,
            remaining_seconds=whole - elapsed,
            moved=now - 1,
            moved_by="log",
            silent_seconds=1.0,
            stalled=False,
            waiting_for=None,
            kind="",
        )
        return replace(start, **changes)

    def done(self, ready_for: float) -> Start:
        """Return a start that became ready `ready_for` seconds ago."""
        at = self.ago(ready_for)
        start = Example(at).start(StartPhase.ANSWERING, 1.0, fraction=1.0, eta=None, remaining_seconds=None)
        last = replace(start.phases[-1], ended=at.timestamp())
        return replace(start, phases=(*start.phases[:-1], last), ended=at.timestamp())

    def state(self, phase: Phase, start: Start | None = None, **fields: Any) -> dict[str, Any]:
        """Return a state in the form of `/status`."""
        common = {"since": self.now, "model": "kimi-k2.5", "pid": 12, "starts": 1}
        state = State(**{**common, "phase": phase, "start": start and start.to_json(), **fields})
        return to_json(state, VERSIONS, os.getpid())

    def told(self, diagnosis: Diagnosis, at: datetime, *, listened: bool) -> dict[str, Any]:
        """Return a diagnosis as the state has it."""
        return dict(
            shown(diagnosis, at, Path(f"/var/lib/aerie/crashes/{at:%Y-%m-%dT%H-%M-%SZ}.txt"), listened=listened)
        )

    def crashed(
        self,
        phase: Phase,
        diagnosis: Diagnosis,
        start: Start,
        seconds: float,
        failures: int = 1,
        how: str = "vllm serve ended with exit code 1",
        **fields: Any,
    ) -> dict[str, Any]:
        """Return a state after an engine's crash so many seconds ago."""
        at, listened = self.ago(seconds), start.ended is not None
        return self.state(
            phase,
            start,
            reason=reason(how, diagnosis, listened=listened),
            since=at,
            pid=None,
            exit=Exit(1, None, at) if how.endswith("exit code 1") else None,
            diagnosis=self.told(diagnosis, at, listened=listened),
            failures=failures,
            next_start=at + BACK_OFF[failures - 1] if phase is Phase.FAILED else None,
            **fields,
        )

    def starting(self, start: Start, last_line: str = "", **fields: Any) -> dict[str, Any]:
        began = datetime.fromtimestamp(start.began, UTC)
        return self.state(Phase.STARTING, start, since=began, started=began, last_line=last_line, **fields)


class Examples(Example):
    """One method an example."""

    def starting_early(self) -> dict[str, Any]:
        start = self.start(StartPhase.CONFIGURING, fraction=0.0, eta=None, remaining_seconds=None)
        return self.starting(start, "Resolved architecture: KimiK25ForConditionalGeneration")

    def loading(self) -> dict[str, Any]:
        start = self.start(StartPhase.LOADING_TARGET, 0.41, "26 of 64 shards", waiting_for="rank 3: 41.2 GB read")
        return self.starting(start, "Loading safetensors checkpoint shards:  41% Completed | 26/64")

    def compiling(self) -> dict[str, Any]:
        start = self.start(StartPhase.COMPILING, None, "drafter", moved_by="memory", silent_seconds=47.0)
        return self.starting(start, "[eagle_head] Starting torch.compile")

    def stalled(self) -> dict[str, Any]:
        moving = Example(self.ago(900)).start(StartPhase.JOINING, None, "NCCL 2.29.7", waiting_for="rank 5")
        start = replace(moving, silent_seconds=901.0, stalled=True, eta=None, remaining_seconds=None)
        return self.starting(start, "No available shared memory broadcast block found in 60 seconds.")

    def checking(self) -> dict[str, Any]:
        return self.state(Phase.CHECKING, self.start(StartPhase.ANSWERING), since=self.ago(1))

    def ready(self) -> dict[str, Any]:
        return self.state(
            Phase.READY,
            self.done(7384),
            since=self.ago(7384),
            serving=Serving(23, 4, 0.62, 1193.1, 8410.0),
            speculation=Speculation(918_233, 2_754_699, 1_480_120, (707_039, 459_116, 313_965)),
        )

    def ready_again(self) -> dict[str, Any]:
        """After a failure, which is not forgotten yet."""
        start, failures = self.done(80), 1
        exited = Exit(None, "SIGSEGV", datetime.fromtimestamp(start.began, UTC) - BACK_OFF[failures - 1])
        return self.state(
            Phase.READY,
            start,
            since=self.ago(80),
            starts=3,
            failures=failures,
            hangs=1,
            exit=exited,
            serving=Serving(1, 0, 0.02, 88.4, 0.0),
        )

    def ready_idle(self) -> dict[str, Any]:
        return self.state(Phase.READY, self.done(2), since=self.ago(2), serving=Serving(0, 0, 0.0, 0.0, 0.0))

    def unready(self) -> dict[str, Any]:
        reason = "the engine hangs: no step for 94 s, 23 requests running"
        return self.state(Phase.UNREADY, self.done(9000), since=self.ago(20), reason=reason, hangs=1)

    def failed(self) -> dict[str, Any]:
        start = Example(self.ago(12)).start(StartPhase.LOADING_DRAFTER, 0.5)
        return self.crashed(Phase.FAILED, UNKNOWN, start, 12, failures=2, starts=2)

    def out_of_memory(self) -> dict[str, Any]:
        """What stands outside the engine's output is the cause."""
        start = Example(self.ago(100)).start(StartPhase.LOADING_TARGET, 0.7)
        return self.crashed(
            Phase.FAILED, OUT_OF_MEMORY, start, 100, failures=3, starts=3, how="VLLM::Worker_TP3 (pid 412) died"
        )

    def failed_while_serving(self) -> dict[str, Any]:
        root = replace(UNKNOWN.root, file="vllm/v1/sample/rejection_sampler.py", line=131, function="forward")
        return self.crashed(Phase.FAILED, replace(UNKNOWN, root=root), self.done(900), 2)

    def killed(self) -> dict[str, Any]:
        return self.crashed(Phase.FAILED, KILLED, self.done(900), 2, how="VLLM::EngineCore (pid 77) died")

    def held(self) -> dict[str, Any]:
        start = Example(self.ago(3600)).start(StartPhase.CONFIGURING, eta=None, remaining_seconds=None)
        return self.crashed(Phase.HELD, KNOWN, start, 3600, failures=0)

    def refused(self) -> dict[str, Any]:
        """Held before any engine was started."""
        reason = "/etc/aerie/secrets/api-keys: no key in it; put one on a line"
        return self.state(Phase.HELD, since=self.ago(5), reason=reason, model="", pid=None, starts=0)

    def starting_again(self) -> dict[str, Any]:
        """On the way up after a failure."""
        start = self.start(StartPhase.LOADING_TARGET, 0.41, "26 of 64 shards")
        failures = 3
        at = datetime.fromtimestamp(start.began, UTC) - BACK_OFF[failures - 1]
        told = self.told(UNKNOWN, at, listened=False)
        return self.starting(start, starts=4, failures=failures, exit=Exit(1, None, at), diagnosis=told)

    def stopping(self) -> dict[str, Any]:
        return self.state(Phase.STOPPING, self.done(500), reason="a stop was asked for")

    def stopped(self) -> dict[str, Any]:
        return self.state(Phase.STOPPED, reason="stopped", pid=None)


EXAMPLES = tuple(name for name in vars(Examples) if not name.startswith("__"))
