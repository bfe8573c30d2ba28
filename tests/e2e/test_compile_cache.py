"""Compiled graphs outlive their engine, and a damaged one is set aside and compiled anew: torch.compile as it is."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from service import Service, engine

if TYPE_CHECKING:
    from pathlib import Path

ENGINES = "/var/cache/aerie/engines"
# On a CPU vLLM 0.32.0 cannot load its ahead-of-time graph ("'function' object has no attribute 'finalize_loading'") and
# makes it anew at each start, of inductor's files.
AHEAD_OF_TIME = "/torch_aot_compile/"
PROVEN_WITHIN = 60.0  # seconds after the engine is ready


def shell(service: Service, command: str) -> str:
    return service.compose("exec", "-T", "vllm", "sh", "-c", command).stdout


def proven(service: Service) -> tuple[str, dict[str, Any]]:
    """The directory of this start's graphs, and what is recorded of them once the engine is ready."""
    deadline = time.monotonic() + PROVEN_WITHIN
    while True:
        [directory] = shell(service, f"ls -d {ENGINES}/* | grep -v poisoned").split()
        record: dict[str, Any] = json.loads(shell(service, f"cat {directory}/aerie-cache.json"))
        if "files" in record:
            return directory, record["files"]
        assert time.monotonic() < deadline, f"{directory} was not recorded within {PROVEN_WITHIN:.0f} s"
        time.sleep(1)


def inodes(service: Service, directory: str) -> dict[str, str]:
    lines = shell(service, f"find {directory} -type f -printf '%i %P\\n'").splitlines()
    return {name: inode for inode, name in (line.split(" ", 1) for line in lines)}


def start_again(service: Service) -> float:
    """Restart the container and return the seconds until it is ready."""
    began = time.monotonic()
    service.compose("restart", "--timeout", "20", "vllm")
    waited = service.compose("exec", "-T", "vllm", "aerie", "wait", check=False)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    return time.monotonic() - began


@pytest.mark.slow
def test_graphs_are_kept_and_damaged_ones_are_compiled_anew(running: Service, tmp_path: Path) -> None:
    with engine(running, tmp_path, {"enforce-eager": None}) as service:
        said = service.chat("What is Aerie?", max_tokens=8)["choices"][0]["message"]["content"]
        directory, first = proven(service)
        graphs = {name: about for name, about in first.items() if about[0] and AHEAD_OF_TIME not in name}
        assert graphs, "nothing was compiled"

        before = inodes(service, directory)
        kept = start_again(service)
        after = inodes(service, directory)
        assert {name: after.get(name) for name in graphs} == {name: before[name] for name in graphs}, "compiled anew"

        largest = max(graphs, key=lambda name: graphs[name][0])
        shell(service, f"printf X | dd of={directory}/{largest} bs=1 seek=1000 conv=notrunc status=none")
        anew = start_again(service)
        log = service.compose("logs", "--no-color", "--no-log-prefix").stdout
        assert f"the cache {directory} is damaged: {largest}" in log
        assert shell(service, f"ls {ENGINES}").split().count(f"{directory.rpartition('/')[2]}.poisoned-1") == 1
        _, third = proven(service)
        assert third.keys() >= graphs.keys() - {largest}
        assert service.chat("What is Aerie?", max_tokens=8)["choices"][0]["message"]["content"] == said
        print(f"ready after {kept:.0f} s with the graphs, after {anew:.0f} s without")
