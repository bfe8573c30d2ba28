"""Can this host's GPUs be given to a container, all of them? Looks, waits with a deadline, and says what is missing.

A container gets at its start what the CDI specification names at that moment, for as long as it runs. So before a
start, every GPU must be served by the driver, its nodes must be in /dev, and the specification must name them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .machine import Run, read_machine, run
from .missing import in_words, missing_gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

ALL = "nvidia.com/gpu=all"
"""The CDI name under which compose.yaml asks for the GPUs."""
SPECIFICATIONS = ("etc/cdi", "run/cdi")
"""Where Docker looks for specifications; /var/run is /run."""
REFRESH = "nvidia-cdi-refresh.service"
"""The toolkit's own unit, which writes the specification anew."""
REFRESH_SECONDS = 15.0
"""Between two refreshes: systemd refuses a unit that is started more than five times in ten."""
LOOK_SECONDS = 2.0
NOT_FOUND = 127
CONTROL_NODES = ("nvidiactl", "nvidia-uvm")
"""What CUDA opens besides the GPUs' own nodes. Nothing in the kernel makes the second one: nvidia-modprobe does."""


@dataclass(frozen=True)
class Look:
    """What there is at one moment."""

    driver: bool = False
    served: int = 0  # GPUs that the driver serves, and that still answer on the bus
    nodes: frozenset[str] = frozenset()  # character nodes in /dev, by name
    toolkit: bool = False
    names: frozenset[str] = frozenset()  # what `nvidia-ctk cdi list` can resolve
    specified: frozenset[str] = frozenset()  # nodes that the specification mentions
    # The specification is older than /dev/nvidia-uvm, whose number may have changed since: Docker reads numbers once.
    outdated: bool = False

    @property
    def gpu_nodes(self) -> int:
        """How many GPUs have a node."""
        return sum(name.removeprefix("nvidia").isdigit() for name in self.nodes)

    @property
    def named(self) -> int:
        """How many GPUs the specification names by their number."""
        return sum(name.removeprefix("nvidia.com/gpu=").isdigit() for name in self.names)


def lacks(look: Look, expected: int) -> list[str]:
    """Say what is missing for a container that is to get this many GPUs: causes, without their consequences."""
    if not look.driver:
        found = ["no NVIDIA driver is loaded"]
    elif look.served < expected:
        found = [f"{look.served} of {expected} GPUs"]
    else:
        found = [f"{look.gpu_nodes} of {expected} nodes /dev/nvidia0 and so on"] if look.gpu_nodes < expected else []
        found += [f"no node /dev/{name}" for name in CONTROL_NODES if name not in look.nodes]
    return (found or _lacks_for_cdi(look, expected)) if expected else []


def _lacks_for_cdi(look: Look, expected: int) -> list[str]:
    if not look.toolkit:
        return ["nvidia-ctk, of the NVIDIA container toolkit, is not installed"]
    if ALL not in look.names:
        return [f"no CDI specification names {ALL}"]
    found = [f"the CDI specification names {look.named} of {expected} GPUs"] if look.named < expected else []
    return found + [f"the CDI specification lacks /dev/{name}" for name in CONTROL_NODES if name not in look.specified]


def look_at(root: Path = Path("/"), run: Run = run) -> Look:
    """Look once. Nothing here asks the driver for anything, which can take seconds, or for ever."""
    driver = root / "proc/driver/nvidia"
    nodes = frozenset(path.name for path in (root / "dev").glob("nvidia*") if path.is_char_device())
    code, listed = run(["nvidia-ctk", "cdi", "list"])
    files = {path: _text(path) for at in SPECIFICATIONS for path in (root / at).glob("*.*")}
    texts = {path: text for path, text in files.items() if "nvidia.com/gpu" in text}
    return Look(
        driver=(driver / "version").exists(),
        served=sum(_answers(root, path.parent.name) for path in (driver / "gpus").glob("*/information")),
        nodes=nodes,
        toolkit=code != NOT_FOUND,
        names=frozenset(line.strip() for line in listed.splitlines() if line.startswith("nvidia.com/gpu=")),
        specified=frozenset(node for node in nodes if any(_mentions(text, node) for text in texts.values())),
        outdated=bool(texts) and max(map(_written, texts)) < _written(root / "dev/nvidia-uvm"),
    )


def _text(path: Path) -> str:
    """Read a file; empty where it has gone meanwhile."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _written(path: Path) -> float:
    """Tell when a file was written, or a node made; 0 where it has gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0


def _answers(root: Path, address: str) -> bool:
    """Tell whether the device answers: the driver still lists one that fell off the bus, which reads as all ones."""
    try:
        return (root / "sys/bus/pci/devices" / address / "config").read_bytes()[:2] not in (b"", b"\xff\xff")
    except OSError:
        return False


def _mentions(specification: str, node: str) -> bool:
    """Tell whether the text, of YAML or JSON, names this very node."""
    _, *found = specification.split(f"/dev/{node}")
    return any(not after[:1].isalnum() and after[:1] not in ("-", "_") for after in found)


class Help:
    """Brings about what is missing, where nothing else may do so in time."""

    def __init__(self, run: Run = run, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self.clock = clock
        self.refreshed: float | None = None

    def __call__(self, look: Look, expected: int) -> None:
        """Make /dev/nvidia-uvm where the driver is there; write the specification where only that is missing."""
        if look.driver and "nvidia-uvm" not in look.nodes:
            self.run(["nvidia-modprobe", "-u", "-c", "0"])
            return
        nodes = look.served >= expected and look.gpu_nodes >= expected and "nvidiactl" in look.nodes
        stale = lacks(look, expected) or (look.outdated and self.refreshed is None)
        if not (nodes and look.toolkit and stale):
            return
        if self.refreshed is None or self.clock() - self.refreshed >= REFRESH_SECONDS:
            self.refreshed = self.clock()
            self.run(["systemctl", "restart", REFRESH])


def wait(
    expected: int,
    deadline: float,
    say: Callable[[str], None],
    look: Callable[[], Look] = look_at,
    help_along: Callable[[Look, int], None] | None = None,
    explain: Callable[[int], Iterable[str]] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Wait until a container can get this many GPUs.

    Args:
        expected: the number of GPUs; 0: nothing is waited for.
        deadline: seconds until it is given up.
        say: told what is missing, whenever that changes.
        look: what there is now.
        help_along: does what may bring about what is missing.
        explain: what is known of GPUs that are missing at the end.
        clock: seconds.
        sleep: waits for seconds.

    Returns:
        What is still missing at the deadline, with what explains it; empty: all is there.

    """
    help_along = help_along or Help()
    explain = explain or explained
    began = clock()
    told: list[str] = []
    while True:
        # Once more after the last help, which itself may take its time.
        late = clock() - began >= deadline
        seen = look()
        missing = lacks(seen, expected)
        if expected and (missing or seen.outdated):
            help_along(seen, expected)
            seen = look()
            missing = lacks(seen, expected)
        if not missing:
            return []
        if late:
            return [*missing, *explain(expected)]
        if missing != told:
            say(f"waiting for the GPUs: {'; '.join(missing)}; {deadline - (clock() - began):.0f} s left")
            told = missing
        sleep(min(LOOK_SECONDS, max(0.0, deadline - (clock() - began))))


def explained(expected: int) -> list[str]:
    """Name the GPUs that are missing, by their slots, and what the kernel said of them."""
    return [told.rstrip(".") for told in in_words(missing_gpus(read_machine(data=""), expected))]


def refusal(missing: Sequence[str], expected: int) -> str:
    """Say in one line why no container is started."""
    return f"this host cannot give {expected} GPUs to a container: {'; '.join(missing)}"


def main(arguments: Sequence[str]) -> int:
    """`aerie_host gpus`: 0 where all is there, 1 with the reason where it is not."""
    parser = argparse.ArgumentParser(prog="aerie_host gpus", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "action", choices=["look", "check", "wait"], help="only look; bring about what is missing; and wait for it"
    )
    parser.add_argument("--expected", type=int, default=8, help="GPUs that there must be (default: 8)")
    parser.add_argument("--deadline", type=float, default=600, help="seconds until `wait` gives up (default: 600)")
    given = parser.parse_args(arguments)
    deadline = given.deadline if given.action == "wait" else 0
    help_along = (lambda *_: None) if given.action == "look" else None
    missing = wait(given.expected, deadline, lambda text: print(text, flush=True), help_along=help_along)
    if missing:
        print(refusal(missing, given.expected), flush=True)
        return 1
    print(f"{given.expected} GPUs can be given to a container as {ALL}" if given.expected else "no GPU is expected")
    return 0
