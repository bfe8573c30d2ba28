"""How a contract's program says what it found.

A program names its contracts with `@contract` and ends in `main()`. For each it prints one JSON line: `holds` with the
evidence that the function returned, or with the reason why not. Standard library only, so that it adds no reason of its
own to fail.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable

Check = Callable[[], str | None]
_CHECKS: dict[str, Check] = {}


def contract(name: str) -> Callable[[Check], Check]:
    """Register a function as the proof of a named contract: it returns its evidence, or raises what is wrong."""

    def register(check: Check) -> Check:
        _CHECKS[name] = check
        return check

    return register


def main() -> None:
    """Prove the contracts that are named on the command line, or all of the program's; exit 1 if one is broken."""
    names = sys.argv[1:] or list(_CHECKS)
    if unknown := sorted(set(names) - _CHECKS.keys()):
        sys.exit(f"no such contract here: {', '.join(unknown)} (there are {', '.join(_CHECKS)})")
    broken = False
    for name in names:
        began = time.monotonic()
        verdict: dict[str, object] = {"contract": name}
        try:
            verdict |= {"holds": True, "evidence": _CHECKS[name]() or ""}
        except Exception as error:  # noqa: BLE001 - whatever a check raises is its reason
            traceback.print_exc()
            verdict |= {"holds": False, "reason": f"{type(error).__name__}: {error}"}
            broken = True
        verdict["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(verdict), flush=True)
    sys.exit(broken)
