"""Whether anything moves: the difference between a start that is silent and works, and one that is dead."""

import re

from aerie.startup.activity import FAULTS_A_SECOND, READ, UNSEEN, Activity
from aerie.startup.lines import Line

_FAULTS = 200  # at least, so that a look after a tenth of a second sees no work in a handful
_GREW = 4 * 2**20  # bytes of RSS: below it an allocator breathes
_GPU = 2 * 2**20  # bytes, the grain in which a driver hands out memory

# Written again and again by processes that wait, and by whoever probes them.
_HEARTBEAT = re.compile(
    r"No available shared memory broadcast block|core engine proc\(s\) to |READY message from DP Coordinator"
    r'|"GET /\S* HTTP/|Avg prompt throughput|Engine \d+: '
)
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?")
_REMEMBERED = 1024  # lines; more different ones than that are no heartbeat


class Movement:
    """When a start moved last, what showed it, and for how long it has not moved since.

    How long counts in looks: a machine that was suspended, a process that was paused and a clock that was set are no
    silence of the engine.
    """

    def __init__(self, began: float) -> None:
        self.moved = began
        self.moved_by = "log"
        self.silent_seconds = 0.0
        self._looked = began
        self._said: dict[tuple[str, str], None] = {}
        self._seen: Activity | None = None
        self._seen_at = began
        self._mark: Activity | None = None

    def looked(self, at: float) -> None:
        """Let the time pass until `at`, which a clock says that may be set."""
        self.silent_seconds += min(max(at - self._looked, 0.0), UNSEEN)
        self._looked = at

    def said(self, line: Line, at: float, progress: str = "") -> None:
        """Take a line into account, unless it is a heartbeat or was said before; `progress` is what its bar shows."""
        if not progress and _HEARTBEAT.search(line.text):
            return
        key = (line.process, progress or _NUMBER.sub("#", line.text[:300]))
        if key in self._said:
            return
        self._said[key] = None
        if len(self._said) > _REMEMBERED:
            del self._said[next(iter(self._said))]
        self._move("log", at)

    def entered_phase(self) -> None:
        """Forget what was said: the next phase may rightly say it again, as the second capturing does."""
        self._said.clear()

    def observed(self, activity: Activity, at: float) -> None:
        """Take what the kernel and the driver show into account."""
        before, mark, seconds = self._seen, self._mark, at - self._seen_at
        self._seen, self._seen_at = activity, at
        if before is None or mark is None:
            self._mark = activity
            return
        if _grown(mark, activity, "read_bytes") >= READ:
            by = "read"
        elif _grown(before, activity, "faults") >= max(_FAULTS, FAULTS_A_SECOND * seconds):
            by = "faults"
        elif _grown(mark, activity, "rss_bytes") >= _GREW:
            by = "memory"
        elif _gpu_changed(mark, activity):
            by = "gpu memory"
        else:
            return
        self._mark = activity
        self._move(by, at)

    def _move(self, by: str, at: float) -> None:
        self.moved, self.moved_by, self.silent_seconds = max(self.moved, at), by, 0.0


def _grown(before: Activity, after: Activity, what: str) -> int:
    """Return by how much the counters of all processes have grown; one that has ended takes nothing away."""
    known = {process.pid: getattr(process, what) for process in before.processes}
    return sum(max(0, getattr(process, what) - known.get(process.pid, 0)) for process in after.processes)


def _gpu_changed(before: Activity, after: Activity) -> bool:
    pairs = zip(before.gpu_used_bytes, after.gpu_used_bytes, strict=False)
    return any(abs(now - then) >= _GPU for then, now in pairs)
