"""What the kernel and the driver show of an engine at one moment: the progress of processes that say nothing."""

from dataclasses import dataclass

# What counts as work between two looks. A hung engine spins: its processes burn CPU time and touch no new page. One
# that loads, compiles or warms up does. Measured on the CPU: an engine that idles, or whose worker is stopped, 0 faults
# in 40 s, one that cannot schedule anything up to 8 a second; one that compiles in silence on two busy cores 70 and
# more, with pauses of up to 8 s.
FAULTS_A_SECOND = 20.0
READ = 2**20  # bytes: below it the kernel brings back what memory pressure had taken

UNSEEN = 15.0  # seconds that one look may stand for: while we did not run, neither did the engine, or nobody knows


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
