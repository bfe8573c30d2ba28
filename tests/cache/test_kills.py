"""100 kills while 2 GB are fetched: it always ends whole, and what was fetched is not fetched again."""

import os
import random
import time

from fetching import REPOSITORY, check_published

_KILLS = 100
_SHARDS = 12
_SHARD = 167 * 10**6
_PACE = 30e6
"""Bytes a second: what a kill loses is then what a real one does, and not what lies in loopback's buffers."""


def test_a_hundred_kills(hub, fetcher, tmp_path):
    files = {"config.json": b"{}", "empty": b"", "code/model.py": b"pass\n"}
    for number in range(_SHARDS):
        files[name] = path = tmp_path / (name := f"model-{number:05d}.safetensors")
        _write(path, number)
    hub.repository(REPOSITORY).commit(files)
    size = sum(len(each) if isinstance(each, bytes) else each.stat().st_size for each in files.values())
    assert size > 2 * 10**9
    hub.pace = _PACE
    seed = random.randrange(10**6)  # noqa: S311
    print(f"seed {seed}")
    chance = random.Random(seed)  # noqa: S311
    killed = whole = 0
    began = time.monotonic()
    while killed < _KILLS:
        share = max(size - hub.sent, 0) / max(_KILLS - killed, 1)
        child = fetcher.start()
        # Most in the middle of the bytes; some while it starts, looks what is there, and proves it.
        until_sent = hub.sent + chance.uniform(0, 2 * share)
        until = time.monotonic() + (chance.uniform(0, 0.6) if chance.random() < 0.15 else 15)
        while child.poll() is None and hub.sent <= until_sent and time.monotonic() < until:
            time.sleep(0.005)
        if child.poll() is None:
            child.kill()
            killed += 1
        else:
            whole += child.returncode == 0
            assert child.returncode in (0, -9), child.stderr.read()
        child.communicate()
    hub.pace = None
    done = fetcher.run(timeout=120)
    assert done.code == 0, done.err
    check_published(fetcher, files)
    ratio = hub.sent / size
    print(f"{killed} kills in {time.monotonic() - began:.0f} s: {hub.sent} bytes sent, {ratio:.3f} times the set")
    assert ratio < 1.1


def _write(path, number):
    block = os.urandom(2**20)
    with path.open("wb") as file:
        left = _SHARD + number
        while left:
            # No two blocks are the same, so that one in the wrong place is seen.
            piece = (left.to_bytes(8, "big") + block)[: min(left, 2**20)]
            file.write(piece)
            left -= len(piece)
