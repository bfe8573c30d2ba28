"""Example states in the form of `/status`, one for each thing that its readers must show. Times end at `now`."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

State = dict[str, Any]

# Name and seconds of each phase, as a start of eight ranks takes them.
PHASES = {
    "configuring": 9,
    "spawning workers": 14,
    "joining ranks": 8,
    "loading target": 812,
    "loading drafter": 21,
    "profiling memory": 38,
    "compiling": 96,
    "capturing graphs (measuring)": 12,
    "warming up": 24,
    "capturing graphs": 31,
    "listening": 3,
    "answering": 2,
}

ROOT = {
    "text": "ValidationError: 1 validation error for SpeculativeConfig\n  Value error, eagle3 is only supported for "
    "['llama', 'qwen', 'minicpm', 'gpt_oss'] models. Got self.target_model_config.hf_text_config.model_type='kimi_k2'",
    "process": "APIServer",
    "pid": 21258,
    "file": "vllm/config/speculative.py",
    "line": 752,
    "function": "_verify_args",
    "chain": [
        "ValueError: eagle3 is only supported for ['llama', 'qwen', 'minicpm', 'gpt_oss'] models.",
        "ValidationError: 1 validation error for SpeculativeConfig",
    ],
    "excerpt": [
        "Traceback (most recent call last):",
        '  File "vllm/entrypoints/openai/api_server.py", line 457, in run_server',
        "    return create_engine_config(**config_kwargs, usage_context=usage_context, headless=headless)",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig",
        "  Value error, eagle3 is only supported for ['llama', 'qwen', 'minicpm', 'gpt_oss'] models.",
    ],
}

KNOWN = {
    "signature": "eagle3-target-not-listed",
    "known": True,
    "title": "vLLM refuses the target for EAGLE-3",
    "cause": "This vLLM keeps a list of the target architectures that EAGLE-3 may draft for, and `kimi_k2` is not on "
    "it. The check runs before anything is loaded.",
    "remedy": "Use the image with the patch series for this release, which adds `kimi_k2` to the list; "
    "`aerie patches` prints what an image has.",
    "kind": "configuration",
    "severity": "fatal",
    "source": "https://github.com/vllm-project/vllm/issues/31254",
    "root": ROOT,
    "evidence": [],
}

UNKNOWN = {
    "signature": None,
    "known": False,
    "title": "The engine crashed",
    "cause": "",
    "remedy": "",
    "kind": "crash",
    "severity": "fatal",
    "source": "",
    "root": ROOT
    | {
        "text": "AttributeError: 'KimiK25Config' object has no attribute 'image_token_index'",
        "process": "Worker_TP3",
        "pid": 412,
        "file": "vllm/model_executor/models/llama_eagle3.py",
        "line": 217,
        "function": "load_weights",
        "chain": [],
    },
    "evidence": [
        "kernel: NVRM: Xid (PCI:0000:41:00): 79, pid=412, GPU has fallen off the bus.",
        "cgroup: oom_kill rose from 0 to 1 while this engine ran",
    ],
}


class Example:
    """Builds states as they are at one moment, `now`."""

    def __init__(self, now: datetime | None = None) -> None:
        self.now = (now or datetime.now(UTC)).replace(microsecond=0)

    def ago(self, seconds: float) -> str:
        return (self.now - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")

    def start(self, reached: str, within: float | None, detail: str = "", **changes: Any) -> State:
        """Return a start that is `within` (0 to 1, None where that is not known) through the phase `reached`."""
        names = list(PHASES)
        done, left = names[: names.index(reached)], names[names.index(reached) + 1 :]
        in_phase = PHASES[reached] * (within or 0.3)
        elapsed = in_phase + sum(PHASES[name] for name in done)
        at, phases = elapsed, []
        for name in done:
            phases.append({"name": name, "began": self.ago(at), "ended": self.ago(at - PHASES[name]), "fraction": 1.0})
            at -= PHASES[name]
        phases.append({"name": reached, "began": self.ago(at), "ended": None, "fraction": within})
        phases += [{"name": name, "began": None, "ended": None, "fraction": None} for name in left]
        for phase in phases:
            phase["detail"] = detail if phase["name"] == reached else ""
        remaining = sum(PHASES.values()) - elapsed
        return {
            "phases": phases,
            "phase": reached,
            "fraction": elapsed / sum(PHASES.values()),
            "began": self.ago(elapsed),
            "ended": None,
            "eta": self.ago(-remaining),
            "remaining_seconds": remaining,
            "moved": self.ago(1),
            "moved_by": "log",
            "silent_seconds": 1.0,
            "stalled": False,
            "waiting_for": "",
        } | changes

    def finished_start(self, ready_for: float) -> State:
        """Return a start that became ready `ready_for` seconds ago."""
        start = self.start("answering", 1.0, fraction=1.0, eta=None, remaining_seconds=None)
        start = copy.deepcopy(start)
        for moment in [start, *start["phases"]]:
            for key in ("began", "ended", "moved"):
                if moment.get(key):
                    earlier = datetime.fromisoformat(moment[key]) - timedelta(seconds=ready_for)
                    moment[key] = earlier.isoformat().replace("+00:00", "Z")
        start["ended"] = start["phases"][-1]["ended"] = self.ago(ready_for)
        return start

    def state(self, phase: str, **changes: Any) -> State:
        """Return a state in `phase` with nothing else to say, and then `changes`."""
        return {
            "schema": 2,
            "phase": phase,
            "since": self.ago(0),
            "reason": None,
            "model": "kimi-k2.5",
            "start": None,
            "engine": {"pid": 12, "starts": 1, "started": self.ago(0), "exit": None},
            "diagnosis": None,
            "serving": None,
            "speculation": None,
            "last_line": "",
            "next_start": None,
            "failures": 0,
            "hangs": 0,
            "versions": {"aerie": "0.3.0", "vllm": "0.32.0"},
        } | changes

    # --- One method an example; `EXAMPLES` names them all ---

    def starting_early(self) -> State:
        start = self.start("configuring", None, eta=None, remaining_seconds=None, fraction=None)
        line = "INFO 11-29 13:34:58 [model.py:1010] Resolved architecture: KimiK25ForConditionalGeneration"
        return self.state("starting", since=start["began"], start=start, last_line=line)

    def loading(self) -> State:
        start = self.start("loading target", 0.41, "26 of 64 shards", waiting_for="rank 3: 41.2 GB read")
        line = "Loading safetensors checkpoint shards:  41% Completed | 26/64"
        return self.state("starting", since=start["began"], start=start, last_line=line)

    def compiling(self) -> State:
        moved = {"moved": self.ago(47), "moved_by": "memory", "silent_seconds": 47.0}
        start = self.start("compiling", None, "eagle_head", waiting_for="torch.compile, which says nothing", **moved)
        return self.state(
            "starting", since=start["began"], start=start, last_line="[eagle_head] Starting torch.compile"
        )

    def stalled(self) -> State:
        moved = {"moved": self.ago(1870), "silent_seconds": 1870.0, "stalled": True, "remaining_seconds": None}
        start = self.start("joining ranks", None, "", waiting_for="rank 5 of 8", eta=None, **moved)
        line = "No available shared memory broadcast block found in 60 seconds."
        return self.state("starting", since=start["began"], start=start, last_line=line)

    def checking(self) -> State:
        start = self.start("answering", None, "the first completion")
        return self.state("checking", since=self.ago(1), start=start)

    def ready(self) -> State:
        return self.state(
            "ready",
            since=self.ago(7384),
            start=self.finished_start(7384),
            serving={
                "requests_running": 23,
                "requests_waiting": 4,
                "kv_cache_usage": 0.62,
                "generation_tokens_per_second": 1193.1,
                "prompt_tokens_per_second": 8410.0,
            },
            speculation={
                "drafts": 918_233,
                "draft_tokens": 2_754_699,
                "accepted_tokens": 1_480_120,
                "accepted_by_position": [707_039, 459_116, 313_965],
            },
        )

    def ready_idle(self) -> State:
        serving = {
            "requests_running": 0,
            "requests_waiting": 0,
            "kv_cache_usage": 0.0,
            "generation_tokens_per_second": 0.0,
            "prompt_tokens_per_second": 0.0,
        }
        return self.state("ready", since=self.ago(2), start=self.finished_start(2), serving=serving)

    def unready(self) -> State:
        reason = "no answer from the engine for 94 s while 23 requests run: it hangs and is ended"
        return self.state("unready", since=self.ago(20), start=self.finished_start(9000), reason=reason, hangs=1)

    def failed(self) -> State:
        start = self.start("loading drafter", 0.5)
        return self.state(
            "failed",
            since=self.ago(12),
            reason="vllm serve ended with exit code 1: AttributeError: 'KimiK25Config' object has no attribute "
            "'image_token_index'",
            start=start,
            engine={
                "pid": None,
                "starts": 2,
                "started": start["began"],
                "exit": {"code": 1, "signal": None, "at": self.ago(12)},
            },
            diagnosis=UNKNOWN | {"at": self.ago(12), "report": "/var/lib/aerie/crashes/2026-11-29T134458Z.txt"},
            next_start=self.ago(-48),
            failures=2,
        )

    def held(self) -> State:
        start = self.start("configuring", None, eta=None, remaining_seconds=None)
        return self.state(
            "held",
            since=self.ago(3600),
            reason="vllm serve ended with exit code 1: vLLM refuses the target for EAGLE-3",
            start=start,
            engine={
                "pid": None,
                "starts": 1,
                "started": start["began"],
                "exit": {"code": 1, "signal": None, "at": self.ago(3600)},
            },
            diagnosis=KNOWN | {"at": self.ago(3600), "report": "/var/lib/aerie/crashes/2026-11-29T134458Z.txt"},
            failures=1,
        )

    def refused(self) -> State:
        """Held before any engine was started."""
        return self.state(
            "held",
            model="",
            since=self.ago(5),
            reason="/etc/aerie/secrets/api-keys: no key in it; put one on a line",
            engine={"pid": None, "starts": 0, "started": None, "exit": None},
        )

    def starting_again(self) -> State:
        """On the way up after a failure."""
        again = self.loading()
        again["engine"]["starts"] = 3
        return again | {"diagnosis": self.failed()["diagnosis"] | {"at": self.ago(2000)}, "failures": 2}

    def stopping(self) -> State:
        return self.state("stopping", start=self.finished_start(500), reason="a stop was asked for")

    def stopped(self) -> State:
        return self.state("stopped", reason="stopped")


EXAMPLES = tuple(
    name for name in vars(Example) if name not in {"ago", "start", "finished_start", "state"} and "__" not in name
)
