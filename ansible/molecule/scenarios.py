"""Run Molecule scenarios, several at a time: each role's, and `site`, the plays' own, which lies beside this file.

The output of each goes to .aerie/molecule/ROLE-SCENARIO.log, and what Ansible keeps while it runs to a directory
beside that; a single one is shown as it runs. Exit code 1 says that one failed, 2 that none is called so, 130 that an
interrupt (Ctrl-C, SIGTERM) came; that ends what runs, and destroys its instances.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
AT_ONCE = 3
"""How many run at a time. For the most part a scenario waits: for apt, for Docker, for what it started."""
LONGEST = (
    "vllm/default",
    "site/default",
    "nvidia_driver/default",
    "vllm/unit",
    "docker/default",
    "pcie_fabric/default",
    "nvidia_container_toolkit/default",
    "model_cache/default",
    "vllm/many",
    "pcie_fabric/proof",
)
"""Begin first, in this order, so that no long one is left alone at the end."""
TAIL_LINES = 60
"""Lines of a failed one's log that are shown."""
PATIENCE = 60.0
"""Seconds that an interrupted one has to end what it runs on its instances."""


class Scenario(NamedTuple):
    """One molecule.yml."""

    project: Path
    """The directory that Molecule is run in: a role's, or `site`."""
    name: str

    @property
    def role(self) -> str:
        """What it tests."""
        return self.project.name

    @property
    def label(self) -> str:
        """What people call it."""
        return f"{self.role}/{self.name}"


def find(repository: Path) -> list[Scenario]:
    """Return every scenario of the tree, in the order in which they begin."""
    places = ("ansible/roles/*/molecule/*/molecule.yml", "ansible/molecule/*/molecule/*/molecule.yml")
    files = [file for place in places for file in repository.glob(place)]
    scenarios = [Scenario(file.parents[2], file.parent.name) for file in files]
    places_of = {label: place for place, label in enumerate(LONGEST)}
    return sorted(scenarios, key=lambda scenario: (places_of.get(scenario.label, len(LONGEST)), scenario.label))


def choose(scenarios: list[Scenario], wanted: list[str]) -> list[Scenario]:
    """Return those whose role or label is wanted, all where nothing is; LookupError names what there is."""
    known = {name for scenario in scenarios for name in (scenario.role, scenario.label)}
    if unknown := [name for name in wanted if name not in known]:
        labels = ", ".join(scenario.label for scenario in scenarios)
        raise LookupError(f"no Molecule scenario is called {' or '.join(unknown)}; there are {labels}")
    return [scenario for scenario in scenarios if not wanted or {scenario.role, scenario.label} & set(wanted)]


async def molecule(command: str, scenario: Scenario, home: Path, log: Path | None) -> int:
    """Run one command of Molecule on the scenario, with its output at the end of the log, and return its exit code."""
    # Ansible's home holds what Molecule knows of the instances: two scenarios of one role write each other's.
    environment = os.environ | {"ANSIBLE_HOME": str(home)} | ({"NO_COLOR": "1"} if log else {})
    with log.open("ab") if log else contextlib.nullcontext() as output:
        process = await asyncio.create_subprocess_exec(
            "molecule", command, "--scenario-name", scenario.name,
            cwd=scenario.project, env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT,
            # Ctrl-C is for this program alone, which then ends one after the other.
            start_new_session=True,
        )  # fmt: skip
    try:
        return await process.wait()
    except asyncio.CancelledError:
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


class Run:
    """Runs scenarios, and says when each begins and ends."""

    def __init__(self, scenarios: list[Scenario], logs: Path, at_once: int) -> None:
        self.scenarios = scenarios
        self.logs = logs
        self.places = asyncio.Semaphore(at_once)

    async def run(self) -> list[str]:
        """Run them all, also when some fail; return the labels of those."""
        passed = await asyncio.gather(*(self.one(scenario) for scenario in self.scenarios))
        return [scenario.label for scenario, good in zip(self.scenarios, passed, strict=True) if not good]

    async def one(self, scenario: Scenario) -> bool:
        """Run it when there is a place for it, and return whether it passed."""
        home = self.logs / f"{scenario.role}-{scenario.name}"
        log = None if len(self.scenarios) == 1 else home.with_suffix(".log")
        async with self.places:
            shutil.rmtree(home, ignore_errors=True)
            if log:
                log.unlink(missing_ok=True)
            say(f"begins  {scenario.label}" + (f"  (tail -f {log})" if log else ""))
            began = time.monotonic()
            try:
                code = await molecule("test", scenario, home, log)
            except asyncio.CancelledError:
                say(f"interrupted  {scenario.label}: its instances go")
                await molecule("destroy", scenario, home, log)
                raise
        took = f"{time.monotonic() - began:.0f} s"
        if code:
            shown = f"; the end of its log:\n\n{tail(log)}\n\nAll of it: {log}" if log else ""
            say(f"FAILED  {scenario.label}: {took}{shown}")
        else:
            say(f"passed  {scenario.label}: {took}")
        return code == 0


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    with log.open(errors="replace") as lines:
        return "".join(collections.deque(lines, TAIL_LINES)).rstrip()


def say(text: str) -> None:
    """Print what there is to see as it happens, also through a pipe."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


async def main(scenarios: list[Scenario], at_once: int) -> int:
    """Run the scenarios and return the exit code."""
    if current := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    logs = REPOSITORY / ".aerie/molecule"
    logs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed = await Run(scenarios, logs, at_once).run()
    print(f"\nMolecule: {time.monotonic() - began:.0f} s" + "".join(f"\n  failed: {label}" for label in failed))
    print(f"{len(scenarios) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="./run test-molecule", description="Run Molecule scenarios.")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, metavar="N", help=f"how many ({AT_ONCE})")
    parser.add_argument("--list", action="store_true", help="print their names and run none")
    parser.add_argument(
        "wanted", nargs="*", metavar="ROLE[/SCENARIO]", help="those of a role or of `site`, or one (all)"
    )
    arguments = parser.parse_args()
    try:
        chosen = choose(find(REPOSITORY), arguments.wanted)
    except LookupError as error:
        parser.error(str(error))
    if arguments.list:
        print("\n".join(scenario.label for scenario in chosen))
        sys.exit()
    try:
        sys.exit(asyncio.run(main(chosen, arguments.at_once)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
