"""Runs `aerie rehearse` on a GPU: the real Kimi-K2.5's configuration, the tiny pair, and faults that it must find.

Contracts of `rehearsal.py`, which says how to run them. With AERIE_KEEP, a directory, each rehearsal that is to pass
leaves its report (JSON and JUnit's XML) and its engine's log there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from supervising import BASE, REPOSITORY, TINY, with_vllm

sys.path.insert(0, str(REPOSITORY / "tests/patches/contracts"))

from verdict import contract, main

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = REPOSITORY / "tests/models"
DRAFTER = MODELS / "lightseekorg--kimi-k2.5-eagle3-mla"
# The published pair, and the configuration that is shipped for it, on one GPU, in whose memory the whole does not fit.
TARGET = ["--target", str(MODELS / "moonshotai--Kimi-K2.5"), "--without-weights", "--accept", "memory"]
REAL = [*TARGET, "--drafter", str(DRAFTER)]
ONE_GPU = ["--config", str(REPOSITORY / "config/kimi-k2.5.yaml"), "--tensor-parallel-size", "1"]


@dataclass
class Rehearsal:
    """What one came to: its exit code, its report, and the seconds until it had ended."""

    code: int
    report: dict[str, Any]
    cases: int
    seconds: float

    def failed(self) -> dict[str, dict[str, Any]]:
        """Return the findings that failed, by their checks."""
        return {each["check"]: each for each in self.report["findings"] if each["verdict"] == "failed"}

    def passed(self) -> str:
        """Return the times of its steps; AssertionError where it did not pass."""
        assert self.code == 0, f"exit code {self.code}: {self.failed()}"
        assert self.report["verdict"] == "passed"
        assert self.report["profile"] == "gpu"
        assert self.cases == len(self.report["findings"]), "the XML has not every finding"
        steps = [each for each in self.report["findings"] if each["seconds"] is not None]
        times = ", ".join(f"{each['check']} {each['seconds']:.1f}" for each in steps)
        return f"passed after {self.seconds:.0f} s; {times}"


def rehearse(name: str, *options: str) -> Rehearsal:
    """Run `aerie rehearse` with these options; what is kept of it has that name, and nothing is without one."""
    with tempfile.TemporaryDirectory(prefix="aerie-rehearse-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        report, xml, work = folder / "report.json", folder / "report.xml", folder / "work"
        command = [
            sys.executable, "-m", "aerie.cli", "rehearse", "--cache-dir", str(folder), "--work-dir", str(work),
            "--json", str(report), "--junit", str(xml), *options,
        ]  # fmt: skip
        began = time.monotonic()
        code = subprocess.run(command, env=with_vllm(folder, {}), stdin=subprocess.DEVNULL, check=False).returncode
        seconds = time.monotonic() - began
        if name and (keep := os.environ.get("AERIE_KEEP")):
            for file, kind in ((report, "json"), (xml, "xml"), (work / "engine.log", "log")):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy(file, Path(keep, f"{name}.{kind}"))
        cases = len(list(ET.parse(xml).getroot().iter("testcase")))  # noqa: S314 - written by our own command
        return Rehearsal(code, json.loads(report.read_text()), cases, seconds)


def choices(rehearsal: Rehearsal) -> dict[str, str]:
    """Return what is said of each implementation that the engine chose."""
    ends = ("backend", "sampler", "runner", "graphs")
    return {each["check"]: each["text"] for each in rehearsal.report["findings"] if each["check"].endswith(ends)}


@contract("real-pair-rehearses")
def real_pair() -> str:
    """The published pair's configuration, shrunken in depth and experts, passes with the shipped arguments."""
    rehearsal = rehearse("real-pair", *REAL, "--", *ONE_GPU)
    evidence = rehearsal.passed()
    chose = choices(rehearsal)
    assert chose["experts backend"].startswith("MARLIN WNA16"), chose
    changed = {change["field"] for change in rehearsal.report["changes"]}
    assert changed <= {"num_hidden_layers", "n_routed_experts", "drafter.eagle_aux_hidden_state_layer_ids"}, changed
    return f"{evidence}; {chose}"


@contract("tiny-pair-rehearses")
def tiny_pair() -> str:
    """The tiny pair, whose weights are there, passes with CUDA graphs."""
    config = {name: value for name, value in BASE.items() if name != "host"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "serve.yaml")
        file.write_text(yaml.safe_dump(config))
        return rehearse("tiny-pair", "--config", str(file)).passed()


@contract("rehearses-as-on-sm-120")
def as_on_sm_120() -> str:
    """With an FP8 cache on TRITON_MLA, which is what sm_120 has, the kernel compiles for sm_120 and the engine serves.

    Without the patch it ends at the compilation. One rank decodes with all 64 heads: at 128 sequences its workspace,
    which is outside of the profile, would be 16 GiB, and no memory is left for the cache that was planned.
    """
    options = ["--chip", "sm_120", "--gpus", "1", "--accept", "patches", "--accept", "KV cache type"]
    triton = ["--kv-cache-dtype", "fp8", "--attention-backend", "TRITON_MLA", "--max-num-seqs", "32"]
    return rehearse("as-on-sm-120", *REAL, *options, "--", *ONE_GPU, *triton).passed()


@contract("aux-layer-beyond-the-model")
def aux_layer() -> str:
    """A drafter that reads layer 70 of 61 fails before anything is started."""
    with _drafter_of([2, 30, 70]) as drafter:
        return _found("auxiliary layers", "70", *TARGET, "--drafter", str(drafter), "--", *ONE_GPU)


@contract("backend-of-another-chip")
def backend() -> str:
    """An attention backend that this chip has not fails at the engine's start, with what to change."""
    return _found("start", "CUTLASS_MLA", *REAL, "--", *ONE_GPU, "--attention-backend", "CUTLASS_MLA")


def _found(check: str, text: str, *options: str) -> str:
    rehearsal = rehearse("", *options)
    failed = rehearsal.failed()
    assert rehearsal.code == 1, f"exit code {rehearsal.code}"
    assert check in failed, f"{check} did not fail: {failed}"
    told = " ".join(str(failed[check][name]) for name in ("text", "remedy"))
    assert text in told + json.dumps(rehearsal.report["diagnosis"]), told
    return f"found after {rehearsal.seconds:.0f} s: {told}"


@contextlib.contextmanager
def _drafter_of(layers: list[int]) -> Iterator[Path]:
    """Make a copy of the published drafter's configuration that reads these layers."""
    config = json.loads((DRAFTER / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


if __name__ == "__main__":
    assert (TINY / "target").is_dir(), f"no tiny pair in {TINY}: set AERIE_TINY"
    main()
