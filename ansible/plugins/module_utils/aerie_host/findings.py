"""What is right and what is wrong with a machine that is to serve: every check at once, as a table or JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from . import check_gpus, check_host
from .topology import classify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from .finding import Finding, Wanted
    from .machine import Machine

# The worst first.
VERDICTS = ("fail", "role", "warn", "unknown", "ok")
WIDTH = 120

# In the order in which the table shows them.
CHECKS: dict[str, Callable[[Machine, Wanted], Iterable[Finding]]] = {
    "distribution": check_host.distribution,
    "architecture": check_host.architecture,
    "kernel": check_host.kernel,
    "virtualisation": check_host.virtualisation,
    "firmware": check_host.firmware,
    "secure_boot": check_host.secure_boot,
    "gpus": check_gpus.gpus,
    "gpu_model": check_gpus.gpu_model,
    "gpu_errors": check_gpus.gpu_errors,
    "driver": check_gpus.driver,
    "vram": check_gpus.vram,
    "pcie": check_gpus.pcie,
    "bar1": check_gpus.bar1,
    "above_4g": check_gpus.above_4g,
    "acs": check_gpus.acs,
    "iommu": check_gpus.iommu,
    "aspm": check_gpus.aspm,
    "numa": check_gpus.numa,
    "topology": check_gpus.topology,
    "numa_balancing": check_gpus.numa_balancing,
    "cpu_governor": check_gpus.cpu_governor,
    "memory": check_host.memory,
    "data": check_host.data,
    "data_space": check_host.data_space,
    "data_rate": check_host.data_rate,
    "shm": check_host.shm,
    "nofile": check_host.nofile,
    "memlock": check_host.memlock,
    "cgroup": check_host.cgroup,
    "time_sync": check_host.time_sync,
    "clock": check_host.clock,
    "held": check_host.held,
    "docker": check_host.docker,
    "toolkit": check_host.toolkit,
}


def judge(machine: Machine, wanted: Wanted) -> list[Finding]:
    """Judge everything at once. ValueError: `wanted.accept` names no check."""
    unknown = [name for name in wanted.accept if name.partition(":")[0] not in CHECKS]
    if unknown:
        raise ValueError(f"no such check: {', '.join(unknown)}. There are: {', '.join(CHECKS)}")
    found = [finding for check in CHECKS.values() for finding in check(machine, wanted)]
    return [
        dataclasses.replace(finding, verdict="warn", accepted=True)
        if finding.verdict == "fail" and {finding.check, finding.name} & set(wanted.accept)
        else finding
        for finding in found
    ]


def table(findings: list[Finding]) -> str:
    """Lay the lines out for a person: columns, each remedy below its line, and last how many there are of each verdict.

    Devices of which a check says the same share a line.
    """
    lines = [_row("VERDICT", "CHECK", "VALUE", "WANTED")]
    for finding, subjects in _together(findings):
        verdict = "accepted" if finding.accepted else finding.verdict
        shown = verdict.upper() if verdict == "fail" else verdict
        lines.append(_row(shown, finding.check, _value(finding, subjects), finding.wanted))
        lines += [_INDENT + line for line in finding.detail]
        if finding.remedy and finding.verdict != "ok":
            lines.append(
                textwrap.fill(f"-> {finding.remedy}", WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT + "   ")
            )
    return "\n".join([*lines, "", summary(findings)])


def failures(findings: list[Finding]) -> str:
    """Tell what only a person can mend, a line each, for a message."""
    failed = [finding for finding in findings if finding.verdict == "fail"]
    return "\n".join(
        f"{finding.check}: {_value(finding, subjects)} (wanted: {finding.wanted}). -> {finding.remedy}"
        for finding, subjects in _together(failed)
    )


def _value(finding: Finding, subjects: list[str]) -> str:
    return f"{', '.join(subjects)}: {finding.value}" if subjects else finding.value


_COLUMNS = (9, 16, 56, 37)  # characters, of which the last of each stays free
_INDENT = " " * sum(_COLUMNS[:2])


def _row(*cells: str) -> str:
    wrapped = [
        textwrap.wrap(cell, width - 1, break_on_hyphens=False) or [""]
        for cell, width in zip(cells, _COLUMNS, strict=True)
    ]
    height = max(len(cell) for cell in wrapped)
    rows = [[cell[at] if at < len(cell) else "" for cell in wrapped] for at in range(height)]
    return "\n".join(
        "".join(f"{cell:<{width}}" for cell, width in zip(row, _COLUMNS, strict=True)).rstrip() for row in rows
    )


def _together(findings: list[Finding]) -> list[tuple[Finding, list[str]]]:
    alike: dict[Finding, list[str]] = {}
    for finding in findings:
        alike.setdefault(dataclasses.replace(finding, subject=""), []).extend(
            [finding.subject] if finding.subject else []
        )
    return list(alike.items())


def summary(findings: list[Finding]) -> str:
    """Count the verdicts, and name the roles that have something to do."""
    counts = Counter(finding.verdict for finding in findings)
    roles = sorted({finding.role for finding in findings if finding.verdict == "role"})
    said = [
        f"{counts[verdict]} {verdict}" + (f" ({', '.join(roles)})" if verdict == "role" else "")
        for verdict in VERDICTS
        if counts[verdict]
    ]
    return ", ".join(said)


def to_json(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """Everything: the lines, the matrix, and the machine as it was read."""
    shape = classify(machine)
    return {
        "schema": 1,
        "host": machine.hostname,
        "verdict": next(
            (verdict for verdict in VERDICTS if any(finding.verdict == verdict for finding in findings)), "ok"
        ),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "topology": {
            "name": shape.name,
            "gpus": list(shape.gpus),
            "matrix": shape.matrix(),
            "numa": {str(k): list(v) for k, v in shape.groups.items()},
        },
        "machine": machine.to_json(),
    }
