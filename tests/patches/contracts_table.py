"""The table of contracts: read from `contracts.toml`, and shown in `docs/patches.md`.

`PYTHONPATH=patches:tests python3 tests/patches/contracts_table.py` writes the page's table anew; a test compares.
"""

from __future__ import annotations

import ast
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from engine_trees import patches_of

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PAGE = REPOSITORY / "docs/patches.md"
RECORDED = HERE.parent / "gpu/results"
BEGIN, END = "<!-- contracts: begin -->", "<!-- contracts: end -->"

# What a program runs on: the two model runners on a CPU, no runner at all, code compiled for the target's chip; and
# what has a command of its own, since it takes 9 GB.
PLACES = ("CPU V1", "CPU V2", "CPU", "sm_120 ahead of time")
ELSEWHERE = "CPU V1 by test-0.16"


@dataclass(frozen=True)
class Row:
    """A contract: for each release either where which program proves it, or why it does not apply."""

    name: str
    proofs: dict[str, dict[str, str]] = field(default_factory=dict)
    not_applicable: dict[str, str] = field(default_factory=dict)

    @property
    def promise(self) -> str:
        """The first line of the docstring of what proves it."""
        program = next(iter(next(iter(self.proofs.values())).values()))
        for function in ast.parse((HERE / "contracts" / f"{program}.py").read_text()).body:
            names = [ast.unparse(decorator) for decorator in getattr(function, "decorator_list", [])]
            if f"contract({self.name!r})" in names:
                return (ast.get_docstring(function) or "").partition("\n")[0]
        raise KeyError(f"{program}.py has no contract {self.name!r}")


@dataclass(frozen=True)
class Without:
    """The contract that breaks when a patch is taken out, where that is shown, and a part of the reason it gives."""

    release: str
    patch: str
    contract: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.release}-{self.patch}-{self.contract}"


@dataclass(frozen=True)
class Run:
    """One run of a program: which contracts it is to prove, where, on which release."""

    release: str
    place: str
    program: str
    contracts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.release}-{self.place}-{self.program}"


@dataclass(frozen=True)
class Table:
    """All rows, in order; the first release is the default."""

    releases: list[str]
    rows: list[Row]
    without: list[Without]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read the table; KeyError or TypeError for one that is not of this form."""
        data = tomllib.loads(path.read_text())
        return cls(
            data["releases"],
            [Row(**row) for row in data["contract"]],
            [Without(**without) for without in data["without"]],
        )

    @property
    def default(self) -> str:
        """The release that the image ships."""
        return self.releases[0]

    def patches(self, release: str) -> list[str]:
        """The names of a release's patches, in order."""
        return list(patches_of(REPOSITORY / "patches" / release))

    def program(self, contract: str, release: str, place: str) -> str:
        """The program that proves a contract there."""
        return next(row for row in self.rows if row.name == contract).proofs[release][place]

    def runs(self) -> list[Run]:
        """What proves all contracts here: each program once for each release and place."""
        return list(self._grouped(self.rows))

    def run_without(self, without: Without) -> Run:
        """The run that shows it, together with what else breaks there without that patch."""
        patch, place = (without.release, without.patch), without.place
        program = self.program(without.contract, without.release, place)
        contracts = tuple(
            other.contract
            for other in self.without
            if (other.release, other.patch) == patch
            and other.place == place
            and self.program(other.contract, other.release, place) == program
        )
        return Run(without.release, place, program, contracts)

    def upstream_runs(self) -> list[Run]:
        """What shows that contracts hold without any patch, where no patch claims them: on the path that ships."""
        for_release = {
            release: {without.contract for without in self.without if without.release == release}
            for release in self.releases
        }
        rows = [
            Row(row.name, {
                release: {place: program for place, program in places.items() if place != "CPU V1" or len(places) == 1}
                for release, places in row.proofs.items()
                if row.name not in for_release[release]
            })
            for row in self.rows
        ]  # fmt: skip
        return list(self._grouped(rows))

    @staticmethod
    def _grouped(rows: list[Row]) -> Iterator[Run]:
        groups: dict[tuple[str, str, str], list[str]] = {}
        for row in rows:
            for release, places in row.proofs.items():
                for place, program in places.items():
                    if place != ELSEWHERE:
                        groups.setdefault((release, place, program), []).append(row.name)
        for key, contracts in groups.items():
            yield Run(*key, tuple(contracts))

    def state(self, row: Row, release: str) -> str:
        """Who keeps this promise on a release."""
        if release in row.not_applicable:
            return f"not applicable: {row.not_applicable[release]}"
        if set(row.proofs.get(release, {})) == {ELSEWHERE}:
            return "with the series"
        patches = [w.patch for w in self.without if (w.release, w.contract) == (release, row.name)]
        return f"patched: {', '.join(f'`{patch}`' for patch in patches)}" if patches else "upstream"


def gpu_proofs(recorded: Path) -> dict[str, str]:
    """For each contract, the GPU and the commit at which it held when it last ran there, as tests/gpu recorded it."""
    last: dict[str, tuple[str, bool]] = {}
    for path in sorted(recorded.glob("*.json")):  # their names begin with the date
        result = json.loads(path.read_text())
        held: dict[str, list[bool]] = {}
        for verdict in result["contracts"]:
            held.setdefault(verdict["contract"], []).append(verdict["holds"])
        where = f"{result['gpu']} at {result['commit'][:7]}"
        last |= {contract: (where, all(verdicts)) for contract, verdicts in held.items()}
    return {contract: where for contract, (where, holds) in last.items() if holds}


def render(table: Table, recorded: Path) -> str:
    """Return the table as Markdown."""
    gpus = gpu_proofs(recorded)
    head = ["contract", "promise"]
    for release in table.releases:
        head += [release, "proven on"]
    lines = [head, ["---"] * len(head)]
    for row in table.rows:
        line = [f"`{row.name}`", row.promise]
        for release in table.releases:
            places = list(row.proofs.get(release, {}))
            if release == table.default:
                places += [gpus[row.name]] if row.name in gpus else []
            line += [table.state(row, release), ", ".join(places)]
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render_into(page: str, table: Table, recorded: Path) -> str:
    """Return the page with its table written anew."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{render(table, recorded)}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render_into(PAGE.read_text(), Table.read(HERE / "contracts.toml"), RECORDED))
