"""Each thing that goes wrong, with the real command as a child: what is published is right, and so is the message."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from fetching import NAME, REPOSITORY, Fetcher, check_published, nothing_published
from hub_server import Blob, Hub

from aerie.cache.manifest import SEGMENT

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PATIENT = {"aerie.cache.patience.ATTEMPTS": 60}


def test_what_is_there_is_published_whole_and_not_fetched_again(hub, fetcher, files, size):
    done = fetcher.run("--json")
    assert done.code == 0, done.err
    check_published(fetcher, files)
    assert json.loads(done.out)["fetched_bytes"] == hub.sent == size
    again = fetcher.run("--json")
    assert json.loads(again.out)["state"] == "there already"
    assert hub.sent == size


def test_a_commit_that_is_published_needs_no_server(hub, fetcher, files):
    commit = hub.repository(REPOSITORY).branches["main"]
    assert fetcher.run("--revision", commit).code == 0
    hub.reset_counters()
    assert fetcher.run("--revision", commit).code == 0
    assert hub.requests == []


# --- The connection ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_is_cut_at_any_byte_costs_nothing(hub, fetcher, files, size, reset):
    offsets = [0, 1, 2, 1023, 65_535, 65_536, 65_537, 131_072, 1_048_575, 1_048_576, 1_048_577, 2_999_999, 3_000_000]
    for offset in offsets:
        hub.fault(f"/cdn/.*{FIRST}", cut_at=offset, times=1, reset=reset)
    fetcher.settings = PATIENT
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, files)
    # With RST the kernel throws away what the client has not read yet.
    assert hub.sent == size if not reset else hub.sent < 3 * size


def test_a_connection_that_breaks_after_every_few_bytes(hub, fetcher, files, size):
    for each in range(1, 40):
        hub.fault("/cdn/", cut_after=each * 3001, times=1)
    fetcher.settings = PATIENT
    assert fetcher.run("--connections", "3").code == 0
    check_published(fetcher, files)
    assert hub.sent == size


def test_it_is_given_up_and_what_came_is_kept(hub, fetcher, files, size):
    hub.fault(f"/cdn/.*{FIRST}", cut_at=2_000_000)
    done = fetcher.run()
    assert done.code == 1
    assert "4 attempts brought nothing; the last one:" in done.err
    assert nothing_published(fetcher)
    hub.faults.clear()
    assert fetcher.run().code == 0
    check_published(fetcher, files)
    assert hub.sent == size


def test_a_server_that_asks_for_patience_is_left_alone(hub, fetcher, files):
    hub.fault("/resolve/", status=429, headers={"Retry-After": "1"}, times=1)
    hub.fault("/api/models", status=429, headers={"Retry-After": "1"}, times=1)
    done = fetcher.run()
    assert done.code == 0, done.err
    assert done.seconds > 2
    assert "answers 429 (too many requests); asking again in 1 s" in done.err
    check_published(fetcher, files)


def test_a_server_that_wants_to_be_left_alone_for_hours_is_believed(hub, fetcher, files):
    hub.fault("/cdn/", status=503, headers={"Retry-After": "7200"})
    done = fetcher.run()
    assert done.code == 1
    assert "it wants to be left alone for 7200 s" in done.err


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_a_server_with_a_problem_is_asked_again(hub, fetcher, files, status):
    for address in ("/api/models", "/resolve/", "/cdn/"):
        hub.fault(address, status=status, times=2)
    assert fetcher.run("--connections", "1").code == 0
    check_published(fetcher, files)


def test_a_server_that_stops_in_the_middle_is_left_and_tried_again(hub, fetcher, files, size):
    hub.fault(f"/cdn/.*{FIRST}", stall_at=1_500_000, times=2)
    fetcher.settings = {"aerie.cache.sources.web.STALL": 0.5}
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, files)
    assert hub.sent == size


def test_a_trickle_is_left_and_tried_again(hub, fetcher, files, size):
    hub.fault(f"/cdn/.*{FIRST}", trickle=0.01, times=1)
    fetcher.settings = {"aerie.cache.sources.web.STALL": 1.0}
    done = fetcher.run()
    assert done.code == 0, done.err
    assert done.seconds < 45
    check_published(fetcher, files)
    assert hub.sent < size + 1000


def test_a_server_without_ranges_is_read_from_the_beginning(hub, fetcher, files):
    hub.fault(f"/cdn/.*{FIRST}", cut_at=1_000_000, times=1)
    hub.fault("/(cdn|resolve)/", ignore_range=True)
    assert fetcher.run("--connections", "1").code == 0
    check_published(fetcher, files)


def test_a_server_without_ranges_sends_each_file_once(hub, fetcher):
    files = {"model.safetensors": os.urandom(2 * SEGMENT + 12_345)}
    hub.repository(REPOSITORY).commit(files)
    hub.fault("/(cdn|resolve)/", ignore_range=True)
    done = fetcher.run()
    assert done.code == 0, done.err
    assert done.err.count("sends whole files") == 1
    check_published(fetcher, files)
    # Each of the three connections has found out for itself, and left what lay in its buffers.
    assert hub.sent < len(files["model.safetensors"]) + 3 * 2**23


def test_another_range_than_was_asked_for_is_not_taken(hub, fetcher, files, size):
    hub.fault("/cdn/", wrong_range=True, times=2)
    assert fetcher.run().code == 0
    check_published(fetcher, files)


@pytest.mark.parametrize("extra", [-5, 5])
def test_an_answer_of_another_length(hub, fetcher, files, extra):
    hub.fault("/cdn/", extra=extra, times=2)
    assert fetcher.run().code == 0
    check_published(fetcher, files)


def test_nobody_listens(fetcher, files):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = fetcher.run("--endpoint", f"http://127.0.0.1:{taken.getsockname()[1]}", source=REPOSITORY)
    assert done.code == 1
    assert "does not answer" in done.err
    assert "Connection refused" in done.err


# --- What comes -------------------------------------------------------------------------------------------------------


def test_wrong_content_of_the_right_size_is_fetched_anew_once(hub, fetcher, files, size):
    hub.fault(f"/cdn/.*{FIRST}", flip_at=1_234_567, times=1)
    done = fetcher.run()
    assert done.code == 0, done.err
    assert f"{FIRST} has the right size and wrong content" in done.err
    check_published(fetcher, files)
    assert hub.sent == size + len(files[FIRST])


def test_content_that_stays_wrong_is_never_published(hub, fetcher, files, size):
    hub.fault(f"/cdn/.*{FIRST}", flip_at=1_234_567)
    done = fetcher.run()
    assert done.code == 1
    assert "wrong content: expected SHA-256" in done.err
    assert "twice" in done.err
    assert nothing_published(fetcher)
    hub.faults.clear()
    hub.reset_counters()
    assert fetcher.run().code == 0
    check_published(fetcher, files)
    assert hub.sent_of.get(SECOND, 0) < len(files[SECOND]) or hub.sent <= size


def test_a_file_of_git_that_is_wrong(hub, fetcher, files):
    hub.fault("/resolve/.*/config.json", flip_at=3)
    done = fetcher.run()
    assert done.code == 1
    assert "config.json has the right size and wrong content: expected git's SHA-1" in done.err
    assert nothing_published(fetcher)


def test_a_server_that_has_another_size_than_it_announced(hub, fetcher, files):
    def grow(_kind, answer):
        for each in answer["siblings"]:
            if each["rfilename"] == FIRST:
                each["size"] += 10
        return answer

    hub.change = grow
    done = fetcher.run()
    assert done.code == 1
    assert "has 3000001 bytes at the source, and 3000011 were announced" in done.err
    assert nothing_published(fetcher)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../escape", "does not stay in the model's directory"),
        ("/etc/passwd", "does not stay in the model's directory"),
        ("a/../../b", "does not stay in the model's directory"),
        ("CONFIG.json", "differ by case alone"),
        ("config.json/below", "is a file and a directory at once"),
        ("bell\x07", "characters that are not shown"),
        ("aerie-manifest.json", "which is Aerie's own"),
        ("x" * 300, "too long for a file system"),
    ],
)
def test_names_that_are_not_taken(hub, fetcher, files, name, words, tmp_path):
    hub.repository(REPOSITORY).commit({**files, name: b"evil"})
    done = fetcher.run()
    assert done.code == 1
    assert words in done.err
    assert hub.sent == 0
    assert nothing_published(fetcher)
    assert not (tmp_path / "escape").exists()


def test_a_revision_that_moves_while_it_is_fetched_stays_the_one_it_was(hub, fetcher, files):
    new = {**files, FIRST: os.urandom(3_000_001)}

    def move(_kind, answer):
        hub.repository(REPOSITORY).commit(new)
        hub.change = lambda _kind, answer: answer
        return answer

    old = hub.repository(REPOSITORY).branches["main"]
    hub.change = move
    assert fetcher.run().code == 0
    assert fetcher.model.current() == old
    check_published(fetcher, files)
    hub.reset_counters()
    assert fetcher.run().code == 0
    assert fetcher.model.previous() == old
    check_published(fetcher, new)
    # What the old revision has by the same SHA-256 came from there.
    assert SECOND not in hub.sent_of


def test_a_file_that_is_the_same_in_a_damaged_revision_is_fetched(hub, fetcher, files):
    assert fetcher.run().code == 0
    damaged = fetcher.published() / SECOND
    damaged.chmod(0o644)
    with damaged.open("r+b") as file:
        file.write(b"damaged")
    new = {**files, FIRST: os.urandom(1000)}
    hub.repository(REPOSITORY).commit(new)
    assert fetcher.run().code == 0
    check_published(fetcher, new)
    assert damaged.read_bytes()[:7] == b"damaged"


def test_zero_files(hub, fetcher):
    hub.repository(REPOSITORY).commit({})
    done = fetcher.run()
    assert done.code == 1
    assert "no files are there" in done.err


def test_two_thousand_small_files_in_nested_directories(hub, fetcher):
    files = {f"a{n % 7}/b{n % 11}/c{n}.json": b"%d" % n * (n % 50) for n in range(2000)}
    hub.repository(REPOSITORY).commit(files)
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, files)
    print(f"2000 files: {done.seconds:.1f} s")


# --- Who may ----------------------------------------------------------------------------------------------------------


def test_a_gated_repository_says_what_to_do(hub, fetcher, files, tmp_path):
    hub.repository(REPOSITORY).gated = True
    hub.token = "hf_right"  # noqa: S105
    done = fetcher.run()
    assert done.code == 1
    assert f"{hub.url}/{REPOSITORY} is gated: accept the licence" in done.err
    assert "--token-file" in done.err
    token = tmp_path / "token"
    token.write_text("hf_wrong\n")
    token.chmod(0o600)
    done = fetcher.run("--token-file", str(token))
    assert done.code == 1
    assert "does not know this token" in done.err
    assert "hf_wrong" not in done.out + done.err
    token.write_text("hf_right\n")
    done = fetcher.run("--token-file", str(token))
    assert done.code == 0, done.err
    check_published(fetcher, files)
    assert "hf_right" not in done.out + done.err + (fetcher.published() / "aerie-manifest.json").read_text()


def test_a_token_without_access(hub, fetcher, files):
    hub.fault("/api/models", status=403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "not yet"})
    fetcher.environment = {"HF_TOKEN": "hf_some"}
    done = fetcher.run()
    assert done.code == 1
    assert "this token's account has no access" in done.err


def test_a_repository_that_is_not_there(hub, fetcher, files):
    del hub.repositories[REPOSITORY]
    done = fetcher.run()
    assert done.code == 1
    assert "is not there, or private: check the name, or it needs a token" in done.err


def test_a_revision_that_is_not_there(fetcher, files):
    done = fetcher.run("--revision", "v9")
    assert done.code == 1
    assert "has no revision 'v9'" in done.err


def test_the_token_goes_to_the_endpoint_alone(hub, fetcher, files):
    fetcher.environment = {"HF_TOKEN": "hf_secret"}
    assert fetcher.run().code == 0
    at_endpoint = [headers for _, path, headers in hub.requests if not path.startswith("/cdn/")]
    elsewhere = [headers for _, path, headers in hub.requests if path.startswith("/cdn/")]
    assert elsewhere
    assert all(headers.get("Authorization") == "Bearer hf_secret" for headers in at_endpoint)
    assert not any("secret" in value for headers in elsewhere for value in headers.values())


def test_a_token_that_others_can_read_is_told(fetcher, files, tmp_path):
    token = tmp_path / "token"
    token.write_text("hf_x")
    token.chmod(0o644)
    assert f"others can read the token's file {token}" in fetcher.run("--token-file", str(token)).err
    assert "cannot be read: No such file" in fetcher.run("--token-file", str(tmp_path / "none")).err


def test_a_signed_address_that_has_expired_is_asked_for_anew(hub, fetcher, files, size):
    hub.fault(f"/cdn/.*{FIRST}", cut_at=1_000_000, times=1)
    hub.fault(f"/cdn/.*{FIRST}", status=403, times=1)
    assert fetcher.run("--connections", "1").code == 0
    check_published(fetcher, files)
    assert hub.sent == size


# --- The disk ---------------------------------------------------------------------------------------------------------


@contextmanager
def tmpfs(path: Path, size: str):
    if os.geteuid() != 0:
        pytest.skip("mounts a tmpfs")
    path.mkdir(exist_ok=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False).returncode != 0:
        pytest.skip("may not mount")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.parametrize("room", [4096 * 6, 4096 * 12, 300_000, 1_000_000, 3_100_000, 5_000_000, 5_490_000])
def test_a_disk_that_is_full_at_any_point(hub, files, size, tmp_path, room):
    with tmpfs(tmp_path / "small", str(room)) as models:
        fetcher = Fetcher(hub, models)
        # The check before would refuse.
        fetcher.settings = {"aerie.cache.fetch.RESERVE": -(10**12)}
        done = fetcher.run()
        assert done.code == 1
        assert any(words in done.err for words in ("the disk is full", "No space left on device")), done.err
        assert nothing_published(fetcher)
        subprocess.run(["mount", "-o", "remount,size=50M", models], check=True)
        sent = hub.sent
        assert fetcher.run().code == 0
        check_published(fetcher, files)
        # What did not fit any more had been sent already.
        assert hub.sent <= size + sent - 0 if room < 1_000_000 else hub.sent < size + 2**20 * 5


def test_room_is_looked_for_before_a_byte_is_fetched(hub, files, tmp_path):
    with tmpfs(tmp_path / "small", "1M") as models:
        done = Fetcher(hub, models, settings={"aerie.cache.fetch.RESERVE": 1000}).run()
        assert done.code == 1
        assert "free, and 5.50 MB are to come" in done.err
        assert "kept" not in done.err
        assert hub.sent == 0


def test_what_is_staged_counts_as_there(hub, files, tmp_path, size):
    with tmpfs(tmp_path / "small", "8M") as models:
        fetcher = Fetcher(hub, models)
        hub.fault(f"/cdn/.*{SECOND}", cut_at=2_400_000)
        assert fetcher.run().code == 1
        hub.faults.clear()
        # 5.4 of 5.5 MB are there, and there would be no room for another 5.5.
        assert fetcher.run().code == 0
        check_published(fetcher, files)
        assert hub.sent == size


def test_a_read_only_file_system(hub, files, tmp_path):
    with tmpfs(tmp_path / "small", "50M") as models:
        subprocess.run(["mount", "-o", "remount,ro", models], check=True)
        done = Fetcher(hub, models).run()
        assert done.code == 1
        assert "Read-only file system" in done.err
        subprocess.run(["mount", "-o", "remount,rw", models], check=True)
        fetcher = Fetcher(hub, models)
        hub.fault("/cdn/", stall_at=1_000_000)
        child = fetcher.start()
        wait_for(lambda: hub.sent > 1_500_000)
        # Every file is closed for it; so it becomes read-only between two runs at the worst.
        child.kill()
        child.communicate()
        subprocess.run(["mount", "-o", "remount,ro", models], check=True)
        done = fetcher.run()
        assert done.code == 1
        assert "ead-only" in done.err


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)


# --- Two at once, and the end in the middle ---------------------------------------------------------------------------


def test_two_fetches_at_once(hub, fetcher, files, size):
    hub.pace = 0.2e6
    first = fetcher.start()
    wait_for(lambda: hub.sent > 100_000)
    refused = fetcher.run()
    hub.pace = 1e6
    assert refused.code == 1
    assert f"`aerie model fetch {REPOSITORY}` (process {first.pid})" in refused.err
    assert "--wait" in refused.err
    second = fetcher.run("--wait", "--json")
    assert second.code == 0
    assert "waiting" in second.err
    assert json.loads(second.out)["fetched_bytes"] == 0
    assert first.wait(30) == 0
    first.communicate()
    assert hub.sent == size
    check_published(fetcher, files)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_the_next_run_goes_on(hub, fetcher, files, size, number):
    hub.pace = 1e6
    child = fetcher.start()
    wait_for(lambda: hub.sent > 1_000_000)
    child.send_signal(number)
    began = time.monotonic()
    _, err = child.communicate(timeout=30)
    assert time.monotonic() - began < 8
    assert child.returncode == 128 + number
    assert "the same command goes on from there" in err
    assert "Traceback" not in err
    sent = hub.sent
    hub.pace = None
    hub.reset_counters()
    done = fetcher.run()
    assert done.code == 0
    assert "are there from before" in done.err
    check_published(fetcher, files)
    # What the server had sent and the child had not read is lost.
    assert hub.sent + sent < size + 2_000_000


# --- What happens between two runs ------------------------------------------------------------------------------------


@pytest.fixture
def half(hub, fetcher, files):
    """The staging of a fetch that was killed when most was there."""
    hub.fault(f"/cdn/.*{FIRST}", stall_at=2_500_000)
    hub.fault(f"/cdn/.*{SECOND}", stall_at=1_500_000)
    child = fetcher.start()
    wait_for(lambda: hub.sent_of.get(FIRST) == 2_500_000 and hub.sent_of.get(SECOND) == 1_500_000)
    staged = fetcher.model.own / "staging"
    wait_for(lambda: sum(each.stat().st_blocks * 512 for each in staged.rglob("*.safetensors")) > 3_000_000)
    child.kill()
    child.communicate()
    hub.faults.clear()
    hub.reset_counters()
    (key,) = fetcher.model.staging_keys()
    return fetcher.model.staging_path(key)


def test_a_killed_fetch_goes_on(hub, fetcher, files, size, half):
    assert fetcher.run().code == 0
    check_published(fetcher, files)
    assert hub.sent < size - 3_000_000


def test_a_bit_that_flips_in_the_staging(hub, fetcher, files, size, half):
    for each in (half / "files").rglob("*.safetensors"):
        with each.open("r+b") as file:
            file.write(bytes([each.read_bytes()[0] ^ 1]))
    done = fetcher.run()
    assert done.code == 0, done.err
    assert "wrong content" in done.err
    check_published(fetcher, files)


def test_power_loss(hub, fetcher, files, half):
    """The ledger is of another boot, and what was not durable is garbage."""
    ledger = (half / "ledger").read_bytes()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert boot.encode() in ledger
    import struct  # noqa: PLC0415
    import zlib  # noqa: PLC0415

    magic, length, _ = struct.unpack_from("<8sQI", ledger)
    text = ledger[20 : 20 + length].replace(boot.encode(), b"0" * len(boot))
    (half / "ledger").write_bytes(struct.pack("<8sQI", magic, length, zlib.crc32(text)) + text + ledger[20 + length :])
    for each in (half / "files").rglob("*.safetensors"):
        each.write_bytes(bytes(each.stat().st_size))
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, files)


@pytest.mark.parametrize("damage", [b"", b"garbage", b"AERIELG1" + bytes(100)])
def test_a_damaged_ledger(hub, fetcher, files, half, damage):
    (half / "ledger").write_bytes(damage)
    done = fetcher.run()
    assert done.code == 0, done.err
    assert "was no ledger" in done.err
    check_published(fetcher, files)


def test_a_ledger_that_was_cut_at_any_length_never_crashes(hub, fetcher, files, half):
    whole = (half / "ledger").read_bytes()
    (half / "ledger").write_bytes(whole[:-7])
    assert fetcher.run().code == 0
    check_published(fetcher, files)


def test_extra_files_in_the_staging(hub, fetcher, files, half):
    (half / "files/extra.bin").write_bytes(b"x")
    (half / "files/deep/er").mkdir(parents=True)
    (half / "files/deep/er/file").write_bytes(b"x")
    os.mkfifo(half / "files/pipe")
    done = fetcher.run()
    assert done.code == 0, done.err
    assert "extra.bin does not belong to what is fetched" in done.err
    check_published(fetcher, files)


def test_symlinks_in_the_staging(hub, fetcher, files, half, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    outside = tmp_path / "outside"
    outside.mkdir()
    (half / "files" / SECOND).unlink(missing_ok=True)
    (half / "files" / SECOND).symlink_to(victim)
    (half / "files/modeling/kimi.py").unlink(missing_ok=True)
    (half / "files/modeling").rmdir()
    (half / "files/modeling").symlink_to(outside)
    (half / "files/config.json").unlink(missing_ok=True)
    os.link(victim, half / "files/config.json")
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, files)
    assert victim.read_bytes() == b"precious"
    assert list(outside.iterdir()) == []


def test_a_symlink_in_place_of_the_ledger(hub, fetcher, files, half, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (half / "ledger").unlink()
    (half / "ledger").symlink_to(victim)
    assert fetcher.run().code == 0
    check_published(fetcher, files)
    assert victim.read_bytes() == b"precious"


def test_a_listing_that_changes_between_two_runs(hub, fetcher, files, half):
    """A mirror that fills a commit bit by bit: what is the same is kept."""
    repository = hub.repository(REPOSITORY)
    (sha,) = repository.commits
    new = {**files, FIRST: os.urandom(len(files[FIRST])), "added.json": b"{}"}
    del new["config.json"]
    repository.commits[sha] = {name: Blob(content) for name, content in new.items()}
    done = fetcher.run()
    assert done.code == 0, done.err
    check_published(fetcher, new)


def test_verified_files_are_not_hashed_again(hub, fetcher, files):
    hub.fault(f"/cdn/.*{SECOND}", cut_at=2_000_000)
    assert fetcher.run().code == 1
    hub.faults.clear()
    fetcher.more = """
        import aerie.cache.hashing as hashing
        original = hashing.digest
        def digest(descriptor, size, on_bytes=None):
            print("hashed", size, file=sys.stderr)
            return original(descriptor, size, on_bytes)
        hashing.digest = digest
    """
    done = fetcher.run()
    assert done.code == 0, done.err
    assert [line for line in done.err.splitlines() if line.startswith("hashed")] == [f"hashed {len(files[SECOND])}"]


@pytest.mark.parametrize("years", [-20, 20])
def test_a_clock_that_jumps(hub, fetcher, files, years):
    """The wall clock jumps back and forth, by years, every few calls."""
    fetcher.more = f"""
        import itertools, time
        real, calls = time.time, itertools.count()
        time.time = lambda: real() + ({years} * 31_556_952 if next(calls) % 3 == 1 else 0)
    """
    hub.fault("/cdn/", status=503, headers={"Retry-After": "1"}, times=1)
    hub.fault("/cdn/", cut_at=1_000_000, times=2)
    hub.fault(f"/cdn/.*{FIRST}", stall_at=2_000_000, times=1)
    fetcher.settings = {"aerie.cache.sources.web.STALL": 0.5}
    done = fetcher.run()
    assert done.code == 0, done.err
    assert done.seconds < 45
    check_published(fetcher, files)


def test_the_hub_is_asked_again_where_what_it_sends_to_is_gone(hub, fetcher, files):
    good, hub.cdn_url = hub.cdn_url, "http://localhost:9"
    fetcher.settings = {"aerie.cache.patience.ATTEMPTS": 1000}
    child = fetcher.start()
    wait_for(lambda: sum("/resolve/" in path for _, path, _ in hub.requests) > 2)
    hub.cdn_url = good
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    check_published(fetcher, files)


def test_a_server_that_does_not_speak_tls_is_asked_once(hub, fetcher, files):
    done = fetcher.run("--endpoint", hub.url.replace("http:", "https:"))
    assert done.code == 1
    assert f"{hub.url.replace('http:', 'https:')} does not speak TLS, which https:// is: is http:// meant" in done.err
    assert "attempts" not in done.err


@pytest.mark.parametrize("given", ["http://me:secret@127.0.0.1:9", "me:secret@127.0.0.1:9"])
def test_a_proxy_that_is_not_there_is_named(hub, fetcher, files, given):
    fetcher.environment = {"HTTPS_PROXY": given}
    done = fetcher.run("--endpoint", "https://hub.example")
    assert done.code == 1
    assert "https://hub.example cannot be reached by the proxy http://127.0.0.1:9, which the environment" in done.err
    assert "secret" not in done.err
    assert "to be named" not in done.err


def test_what_holds_models_is_no_model(fetcher, tmp_path):
    store = tmp_path / "store"
    for name in ("drafter", "target"):
        (store / name).mkdir(parents=True)
        (store / name / "aerie-manifest.json").write_text("{}")
    done = fetcher.run(source=str(store))
    assert done.code == 1
    assert f"{store} is no model: it holds what Aerie has published in drafter, target. Give one" in done.err
    assert nothing_published(fetcher)


# --- Around it --------------------------------------------------------------------------------------------------------


def test_offline_opens_no_connection(hub, fetcher, files):
    fetcher.more = """
        import socket
        def connect(self, address):
            raise AssertionError("a connection was opened")
        socket.socket.connect = connect
    """
    for environment, arguments, why in (
        ({}, ["--offline"], "--offline"),
        ({"HF_HUB_OFFLINE": "1"}, [], "HF_HUB_OFFLINE=1"),
    ):
        fetcher.environment = environment
        done = fetcher.run(*arguments)
        assert done.code == 1
        assert f"cannot be fetched offline ({why}), and nothing of it is in service here" in done.err
        done = fetcher.run(*arguments, "--revision", "main")
        assert done.code == 1
        assert f"offline ({why}), and which commit 'main' is only the source can tell" in done.err
    fetcher.more, kept = "", fetcher.more
    fetcher.environment = {}
    assert fetcher.run().code == 0
    fetcher.more = kept
    assert fetcher.run("--offline").code == 0
    assert fetcher.run("--offline", "--revision", fetcher.model.current()).code == 0
    assert fetcher.run("--offline", "--revision", "0" * 40).code == 1


def test_a_proxy_of_the_environment_is_used(hub, fetcher, files):
    seen = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            seen.append(self.path)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "proxy-connection"}
            answer = httpx.get(self.path, headers=headers, trust_env=False, follow_redirects=False)
            self.send_response(answer.status_code)
            for name, value in answer.headers.items():
                if name.lower() not in {"transfer-encoding", "connection"}:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        fetcher.environment = {"HTTP_PROXY": f"http://127.0.0.1:{server.server_port}", "NO_PROXY": ""}
        # httpx leaves loopback alone unless it is told not to; a name that only the proxy would resolve shows it best.
        fetcher.environment["http_proxy"] = fetcher.environment["HTTP_PROXY"]
        done = fetcher.run()
        assert done.code == 0, done.err
    finally:
        server.shutdown()
        server.server_close()
    check_published(fetcher, files)
    assert any("/api/models" in path for path in seen)
    assert any("/cdn/" in path for path in seen)


def test_a_certificate_that_nobody_signed(models, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    hub = Hub()
    hub.use_tls(certificate, key)
    files = {"config.json": b"{}", "model.safetensors": os.urandom(500_000)}
    hub.repository(REPOSITORY).commit(files)
    with hub:
        fetcher = Fetcher(hub, models)
        done = fetcher.run()
        assert done.code == 1
        assert "name its certificate's file in SSL_CERT_FILE" in done.err
        assert "asking again" not in done.err
        fetcher.environment = {"SSL_CERT_FILE": str(certificate)}
        done = fetcher.run()
        assert done.code == 0, done.err
        check_published(fetcher, files)


def test_only_some_of_the_files(hub, fetcher, files):
    assert fetcher.run("--include", "*.json", "--include", "modeling/", "--exclude", "*.py").code == 0
    assert {each.name for each in fetcher.published().iterdir()} == {"config.json", "aerie-manifest.json"}
    done = fetcher.run()
    assert done.code == 1
    assert "is published with some of the files alone" in done.err


def test_some_of_the_files_of_a_commit_are_not_taken_for_all(hub, fetcher, files, models, tmp_path):
    commit = hub.repository(REPOSITORY).branches["main"]
    some = ("--include", "*.json", "--exclude", "x*")
    assert fetcher.run("--revision", commit, *some).code == 0
    assert fetcher.run("--revision", commit, *some, "--offline").code == 0
    for more in ([], ["--offline"], ["--include", "*.json"], ["--dry-run"]):
        done = fetcher.run("--revision", commit, *more)
        assert done.code == 1
        assert "some of the files alone" in done.err
    # Nor where they are carried on from here.
    path = fetcher.published()
    assert fetcher.run("--name", "Copy", source=str(path)).code == 0
    copied = (models / "Copy" / "current" / "aerie-manifest.json").read_text()
    assert json.loads(copied)["options"]["include"] == '["*.json"]'


def test_a_revision_that_was_renamed_is_not_taken_for_another(hub, fetcher, files):
    first = hub.repository(REPOSITORY).branches["main"]
    assert fetcher.run().code == 0
    second = hub.repository(REPOSITORY).commit({**files, FIRST: os.urandom(len(files[FIRST]))})
    (fetcher.model.path / first).rename(fetcher.model.path / second)
    done = fetcher.run("--revision", second)
    assert done.code == 1
    assert f"its manifest is that of revision {first}" in done.err


def test_a_run_for_some_of_the_files_leaves_what_another_has_fetched(hub, fetcher, files, half):
    assert fetcher.run("--include", "*.json", "--no-switch", "--name", "Kimi-K2.5").code == 0
    assert half.is_dir()
    assert any((half / "files").rglob("*.safetensors"))


def test_a_dry_run_fetches_nothing(hub, fetcher, files, size, models):
    done = fetcher.run("--dry-run", "--json")
    assert done.code == 0
    assert json.loads(done.out)["fetched_bytes"] == size
    assert hub.sent == 0
    assert list(models.iterdir()) == []


def test_a_dry_run_says_what_is_really_to_come(hub, fetcher, files, size, half):
    told = json.loads(fetcher.run("--dry-run", "--json").out)["fetched_bytes"]
    assert 0 < told < size
    assert json.loads(fetcher.run("--json").out)["fetched_bytes"] == told
    # Of a new revision, what the old one has comes from there.
    hub.repository(REPOSITORY).commit({**files, FIRST: os.urandom(1000)})
    told = json.loads(fetcher.run("--dry-run", "--json").out)["fetched_bytes"]
    assert json.loads(fetcher.run("--json").out)["fetched_bytes"] == told
    assert told < size - len(files[SECOND])


def test_a_limit_on_the_rate_holds(hub, fetcher):
    hub.repository(REPOSITORY).commit({f"{n}.safetensors": os.urandom(5_000_000) for n in range(6)})
    hub.pace = 1e9  # in small pieces, which are counted once they are sent
    child = fetcher.start("--limit-rate", "2MB")
    wait_for(lambda: hub.sent > 3_000_000)
    began, sent = time.monotonic(), hub.sent
    time.sleep(5)
    rate = (hub.sent - sent) / (time.monotonic() - began)
    child.kill()
    child.communicate()
    assert rate == pytest.approx(2e6, rel=0.05)


def test_a_directory_is_fetched_by_the_same_engine(hub, files, models, tmp_path):
    source = tmp_path / "weights" / "home-made"
    for name, content in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    fetcher = Fetcher(hub, models)
    done = fetcher.run("--json", source=str(source))
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert (result["name"], result["state"]) == ("home-made", "published")
    again = json.loads(fetcher.run("--json", source=str(source)).out)
    assert (again["revision"], again["fetched_bytes"]) == (result["revision"], 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limit-rate", "fast"], "no rate"),
        (["--connections", "0"], "no number above 0"),
        (["--name", "../x"], "no name for a model"),
        (["--transport", "pigeon"], "invalid choice"),
    ],
)
def test_wrong_usage(fetcher, files, arguments, words):
    done = fetcher.run(*arguments)
    assert done.code == 2
    assert words in done.err


def test_a_models_directory_that_is_not_there(hub, files, tmp_path):
    done = Fetcher(hub, tmp_path / "none").run()
    assert done.code == 1
    assert "is not there: make it, or give --models-dir" in done.err
    (tmp_path / "none").write_text("")
    assert "none is no directory: make it" in Fetcher(hub, tmp_path / "none").run().err


# --- Xet --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def in_xet(hub, files, tmp_path):
    """The shards are in Xet, too: its real storage, on a local disk."""
    import hf_xet  # noqa: PLC0415

    hub.xet_endpoint = f"local://{tmp_path}/cas"
    blobs = {}
    session = hf_xet.XetSession()
    for name, content in files.items():
        blobs[name] = Blob(content)
        if name.endswith(".safetensors"):
            path = tmp_path / name
            path.write_bytes(content)
            with session.new_upload_commit(endpoint=hub.xet_endpoint) as commit:
                upload = commit.start_upload_file(str(path))
            blobs[name].xet_hash = upload.result().xet_info.hash
    hub.repository(REPOSITORY).commit(blobs)
    return blobs


@pytest.mark.parametrize("transport", ["auto", "xet"])
def test_xet_brings_the_bytes(hub, fetcher, files, in_xet, transport):
    fetcher.environment = {"HF_TOKEN": "hf_some"}
    done = fetcher.run("--transport", transport)
    assert done.code == 0, done.err
    check_published(fetcher, files)
    assert not any(path.startswith("/cdn/") for _, path, _ in hub.requests)
    assert len([path for _, path, _ in hub.requests if "/xet-read-token/" in path]) == 1


def test_https_is_taken_where_it_is_asked_for(hub, fetcher, files, in_xet):
    assert fetcher.run("--transport", "https").code == 0
    check_published(fetcher, files)
    assert not any("/xet-read-token/" in path for _, path, _ in hub.requests)


def test_xet_that_has_nothing_is_left_for_https(hub, fetcher, files, in_xet, size, tmp_path):
    hub.xet_endpoint = f"local://{tmp_path}/empty"
    done = fetcher.run()
    assert done.code == 0, done.err
    assert done.err.count("Xet is of no use here") == 1
    check_published(fetcher, files)
    assert fetcher.run("--name", "other", "--transport", "xet").code == 1


def test_xet_that_does_not_answer_is_left_for_https(hub, fetcher, files, in_xet, size):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        hub.xet_endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = fetcher.run(timeout=120)
    assert done.code == 0, done.err
    assert done.err.count("Xet is of no use here") == 1
    check_published(fetcher, files)
    print(f"without Xet's server: {done.seconds:.1f} s")


def test_no_token_for_xet_is_left_for_https(hub, fetcher, files, in_xet):
    hub.fault("/xet-read-token/", status=403)
    done = fetcher.run()
    assert done.code == 0, done.err
    assert "the Hub gives no token for it (403)" in done.err
    check_published(fetcher, files)


def test_a_hub_of_its_own_as_a_program(tmp_path, models):
    folder = tmp_path / "hub" / REPOSITORY
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    program = Path(__file__).parent.parent / "hub_server.py"
    child = subprocess.Popen([sys.executable, program, tmp_path / "hub"], stdout=subprocess.PIPE, text=True)
    try:
        lines = [child.stdout.readline() for _ in range(2)]
        url = lines[1].strip().removeprefix("HF_ENDPOINT=")
        fetcher = Fetcher(Hub.__new__(Hub), models)
        fetcher.hub.url = url
        assert fetcher.run().code == 0
        check_published(fetcher, {"config.json": b"{}"})
        assert httpx.get(f"{url}/_counters", trust_env=False).json()["sent"] == 2
    finally:
        child.terminate()
        child.communicate()


def test_the_name_is_the_repositorys(fetcher, files):
    assert fetcher.run().code == 0
    assert (fetcher.models / NAME / "current").is_symlink()
