"""Two things that only Linux's prctl(2) can ask for."""

import ctypes
import os

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, as process 1 of a container is anyway.

    Raises OSError where the kernel refuses.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_when_parent_dies(number: int) -> None:
    """Have this process sent a signal when the thread that started it ends; raises OSError where the kernel refuses."""
    _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
