"""`aerie fabric numa`: whether a process here may bind its memory to a NUMA node, and where the memory then lies.

vLLM's `numa-bind` starts each rank by numactl(8) on the node of its GPU. Docker's seccomp profile keeps get_mempolicy
and set_mempolicy for containers with CAP_SYS_NICE; without it vLLM goes on unbound, with a warning.
"""

import ctypes
import json
import mmap
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aerie.supervisor import gpus

SCHEMA = 1
_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}  # get_mempolicy, set_mempolicy: asm/unistd.h
_DEFAULT, _BIND = 0, 2  # linux/mempolicy.h
_OF_NODE, _OF_ADDRESS = 1, 2
_MOST_NODES = 1024
_BITS = 64
_SYS_NICE = 23  # linux/capability.h
_PAGES = 64
_WITHOUT_NICE = "Docker's seccomp profile opens it to containers with SYS_NICE: cap_add: [SYS_NICE], as in compose.yaml"
_WITH_NICE = "The container has SYS_NICE, so it is another seccomp profile than Docker's own that forbids it"


@dataclass(frozen=True)
class Node:
    """A NUMA node that this process may use."""

    number: int
    is_bound: bool
    detail: str
    """Why not, or how many pages lay where they had to."""


@dataclass
class Numa:
    """What was found."""

    allowed: Sequence[int]
    """Nodes of /proc/self/status, Mems_allowed_list."""
    has_nice: bool
    """Whether SYS_NICE is in the container's bounding set: its user need not hold it."""
    numactl: str | None
    nodes: list[Node] = field(default_factory=list)
    refused: str = ""
    """What the kernel said where even asking is not allowed."""
    gpu_nodes: Sequence[int] = ()
    """Of each visible GPU; -1 where the firmware does not say."""

    @property
    def works(self) -> bool:
        """Whether memory can be bound to every allowed node, and vLLM can do it, too."""
        return bool(self.nodes) and all(node.is_bound for node in self.nodes) and self.numactl is not None


def numa(*, as_json: bool, root: Path = Path("/")) -> int:
    """Try it, print what came of it, and return 0 where binding works, 1 where not."""
    found = look(root)
    if as_json:
        print(json.dumps(to_json(found), indent=1))
    else:
        print(*lines_of(found), sep="\n")
    return 0 if found.works else 1


def look(root: Path = Path("/")) -> Numa:
    """Bind this process's memory to each node that it may use, one after the other, and back to none."""
    status = _status(root)
    found = Numa(
        allowed=numbers_of(status.get("Mems_allowed_list", "")),
        has_nice=bool(int(status.get("CapBnd", "0"), 16) >> _SYS_NICE & 1),
        numactl=shutil.which("numactl"),
        gpu_nodes=[node_of(address, root) for address in gpus.pci_addresses()],
    )
    try:
        _get_mode()
        found.nodes = [_try_node(number) for number in found.allowed]
    except OSError as error:
        found.refused = error.strerror or str(error)
    return found


def to_json(found: Numa) -> dict[str, object]:
    """Return it as it is printed."""
    return {
        "schema": SCHEMA,
        "works": found.works,
        "allowed": list(found.allowed),
        "sys_nice": found.has_nice,
        "numactl": found.numactl,
        "refused": found.refused,
        "nodes": [{"node": node.number, "bound": node.is_bound, "detail": node.detail} for node in found.nodes],
        "gpus": list(found.gpu_nodes),
    }


def lines_of(found: Numa) -> Iterator[str]:
    """Yield it for people."""
    allowed = ", ".join(map(str, found.allowed)) or "none that the kernel names"
    yield f"NUMA nodes that memory may come from: {allowed}; SYS_NICE: {'yes' if found.has_nice else 'no'}"
    if found.gpu_nodes:
        yield "GPUs on nodes: " + ", ".join(f"{gpu} on {node}" for gpu, node in enumerate(found.gpu_nodes))
    for node in found.nodes:
        yield f"  node {node.number}: {'bound' if node.is_bound else 'NOT BOUND'}, {node.detail}"
    if found.refused:
        yield f"REFUSED: get_mempolicy: {found.refused}. {_WITH_NICE if found.has_nice else _WITHOUT_NICE}"
    if found.numactl is None:
        yield "numactl is not installed, and vLLM's numa-bind starts its ranks by it"
    if found.works:
        yield f"works: numa-bind can be set; {found.numactl}"


def numbers_of(ranges: str) -> list[int]:
    """Return the numbers of a list as the kernel writes it: 0-1,4."""
    numbers: list[int] = []
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _status(root: Path) -> dict[str, str]:
    lines = (root / "proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def node_of(address: str, root: Path = Path("/")) -> int:
    """Return the node of a PCI address, as NVML writes it (its domain has eight digits)."""
    domain, _, rest = address.lower().partition(":")
    try:
        return int((root / "sys/bus/pci/devices" / f"{int(domain, 16):04x}:{rest}" / "numa_node").read_text())
    except OSError:
        return -1


def _try_node(number: int) -> Node:
    try:
        _bind(number)
    except OSError as error:
        return Node(number, is_bound=False, detail=f"set_mempolicy: {error.strerror}")
    try:
        with mmap.mmap(-1, _PAGES * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            where = [_node_at(memory, page * mmap.PAGESIZE) for page in range(_PAGES)]
    finally:
        _bind(None)
    there = where.count(number)
    return Node(number, is_bound=there == _PAGES, detail=f"{there} of {_PAGES} pages lie there")


def _get_mode() -> int:
    mode = ctypes.c_int()
    _call(0, ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    return mode.value


def _bind(node: int | None) -> None:
    """Let new pages come from one node, or from any."""
    mask = (ctypes.c_ulong * (_MOST_NODES // _BITS))()
    if node is not None:
        mask[node // _BITS] |= 1 << node % _BITS
    mode = _DEFAULT if node is None else _BIND
    _call(1, ctypes.c_int(mode), None if node is None else mask, ctypes.c_ulong(0 if node is None else _MOST_NODES))


def _node_at(memory: mmap.mmap, offset: int) -> int:
    """Return where a page lies, after writing to it: only then it lies anywhere."""
    memory[offset] = 1
    start = ctypes.c_char.from_buffer(memory, offset)
    try:
        address = ctypes.addressof(start)
        node = ctypes.c_int(-1)
        _call(
            0,
            ctypes.byref(node),
            None,
            ctypes.c_ulong(0),
            ctypes.c_void_p(address),
            ctypes.c_ulong(_OF_NODE | _OF_ADDRESS),
        )
    finally:
        del start  # a buffer that is looked at cannot be closed
    return node.value


def _call(which: int, *arguments: object) -> None:
    """Call get_mempolicy (0) or set_mempolicy (1): the C library has no wrapper. OSError where the kernel refuses."""
    calls = _CALLS.get(platform.machine())
    if calls is None:
        raise OSError(f"their numbers are not known for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(calls[which]), *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
