"""What a rehearsal came to, and what a planted fault must have brought about."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import FOLDER
from pairs import copy

if TYPE_CHECKING:
    from faults import Fault
    from pairs import Pair

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PAIRS, CONFIG = "/pairs", "/etc/aerie/serve.yaml"
"""Where a container sees the pairs, and config/kimi-k2.5.yaml."""
WITHOUT_WEIGHTS = "--without-weights"


@dataclass(frozen=True)
class Outcome:
    """What one rehearsal came to; `said` is the text for people."""

    code: int
    seconds: float
    report: dict[str, Any]
    said: str

    @classmethod
    def read(cls, line: str) -> Outcome:
        """Return one of several.py's lines."""
        told = json.loads(line)
        assert told["report"], told["said"]
        return cls(**told)

    def findings(self, *verdicts: str) -> list[dict[str, Any]]:
        """The findings with one of these verdicts."""
        return [each for each in self.report["findings"] if each["verdict"] in verdicts]


def arguments(pair: Pair, root: Path, *options: str, vllm: tuple[str, ...] = ()) -> list[str]:
    """Return the arguments of `aerie rehearse` for a pair below `root`, as a container sees it."""
    return [*pair.seen(root, PAIRS), "--chip", "sm_120", "--config", CONFIG, *options, "--", *vllm]


def plant(fault: Fault, pair: Pair, root: Path, *options: str) -> list[str]:
    """Plant a fault in a copy of the pair, and return the arguments that rehearse it."""
    folder = root / fault.name.replace(" ", "-")
    changed = copy(pair, folder)
    fault.plant(changed)
    without = () if fault.weights else (WITHOUT_WEIGHTS,)
    words = arguments(changed, root, *without, *options, *fault.options, vllm=fault.arguments)
    return [word.replace(FOLDER, f"{PAIRS}/{folder.name}") for word in words]


def assert_found(fault: Fault, outcome: Outcome) -> None:
    """Assert that the check found it, in these words, and that nothing else did."""
    assert "Traceback" not in outcome.said
    failed = {each["check"] for each in outcome.findings("failed")}
    if fault.verdict == "failed":
        assert (outcome.code, outcome.report["verdict"], failed) == (1, "failed", {fault.check}), outcome.said
    else:
        assert (outcome.code, outcome.report["verdict"], failed) == (0, "passed", set()), outcome.said
    found = [each for each in outcome.findings(fault.verdict) if each["check"] == fault.check]
    assert any(fault.text in each["text"] and fault.remedy in each["remedy"] for each in found), found
