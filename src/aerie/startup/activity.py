"""What the kernel and the driver show of an engine at one moment: the progress of processes that say nothing."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """One process of the engine."""

    pid: int
    name: str
    """The title it gave itself, such as `VLLM::Worker_TP3`."""
    state: str
    """One letter of `/proc/<pid>/stat`: R, S, D, Z, T ..."""
    read_bytes: int
    """Bytes fetched from storage since it began (`/proc/<pid>/io`); what the page cache held is not in it."""
    faults: int
    """Page faults since it began, minor and major; a mapped checkpoint moves these, not the bytes that were read."""
    rss_bytes: int
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Activity:
    """The whole engine."""

    processes: tuple[ProcessActivity, ...] = ()
    gpu_used_bytes: tuple[int, ...] = ()
    """One for each GPU that the engine may use; empty without a GPU."""
