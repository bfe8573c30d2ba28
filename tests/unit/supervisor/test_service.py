"""`aerie serve` from outside, as Docker and a user drive it."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie import __version__


def below(pid):
    """Return (pid, parent, state) of the processes below `pid`, zombies too."""
    rows = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            rows.append((int(stat.parent.name), int(parent), state))
    pids, size = {pid}, 0
    while size != len(pids):
        size = len(pids)
        pids |= {row[0] for row in rows if row[1] in pids}
    return [row for row in rows if row[0] in pids - {pid}]


def test_it_becomes_ready_and_everybody_reads_the_same_state(serving):
    with serving.run(core=True) as service:
        state = service.until_phase("ready")
        assert state["model"] == "kimi"
        assert state["speculation"]["drafts"] == 5
        assert state["versions"]["aerie"] == __version__
        assert (state["engine"]["starts"], state["failures"], state["reason"]) == (1, 0, None)
        assert service.get("/ready") == (200, '{"ready": true}')
        status, page = service.get("/")
        assert status == 200
        assert "<h1" in page
        service.until(lambda: json.loads(service.state_file.read_text())["phase"] == "ready", "the state file")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(service.get("/metrics")[1])
            for sample in family.samples
        }
        assert samples["aerie_ready",] == samples["aerie_phase", "ready"] == samples["aerie_engine_starts_total",] == 1
        assert samples["aerie_phase", "failed"] == samples["aerie_engine_failures",] == 0


def test_the_engine_gets_the_middleware_the_key_file_and_time_but_no_key(serving):
    with serving.run("--drain-timeout", "5") as service:
        service.until_phase("ready")
        argv = json.loads((service.directory / "argv.json").read_text())
        environ = json.loads((service.directory / "environ.json").read_text())
    assert argv[:2] == ["serve", "org/model"]
    assert argv[-2:] == ["--middleware", "aerie.auth.ApiKeyMiddleware"]
    assert environ["AERIE_API_KEYS_FILE"] == str(service.keys)
    assert environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "86400"
    assert environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "1800"
    told = json.dumps([argv, environ]) + service.state_file.read_text()
    assert "test-key" not in told


def test_a_killed_engine_is_told_at_once_and_started_again_when_nothing_of_it_is_left(serving):
    with serving.run(core=True) as service:
        first = service.until_phase("ready")["engine"]["pid"]
        assert not service.core_is_gone()
        os.kill(first, signal.SIGKILL)
        service.until(lambda: service.get("/ready")[0] == 503, "/ready to say no", limit=5)
        failed = service.until_phase("failed")
        assert failed["reason"].startswith("vllm serve was killed by SIGKILL: ")
        assert failed["reason"] in service.get("/")[1]
        assert failed["engine"]["exit"]["signal"] == "SIGKILL"
        assert failed["next_start"]
        assert json.loads(service.get("/ready")[1]) == {
            "ready": False,
            "phase": "failed",
            "reason": failed["reason"],
        }
        assert service.core_is_gone()
        again = service.until_phase("ready", limit=25)
        assert (again["engine"]["starts"], again["failures"]) == (2, 1)
        assert again["engine"]["pid"] != first
        assert not (service.directory / "two-cores").exists()


def test_an_engine_that_reports_itself_dead_is_unready_with_its_reason(serving):
    with serving.run() as service:
        service.until_phase("ready")
        (service.directory / "health").write_text("503")
        assert service.until_phase("unready", limit=5)["reason"] == "/health answered 503"
        (service.directory / "health").unlink()
        assert service.until_phase("ready")["engine"]["starts"] == 1


@pytest.mark.parametrize(
    ("stub", "reason"),
    [
        ({"serves": "other"}, "/v1/models offers other, and not kimi"),
        ({"drafts": 0}, "speculation is on, and the drafter drafted nothing in a completion"),
    ],
)
def test_healthy_is_not_ready(serving, stub, reason):
    with serving.run(**stub) as service:
        assert service.until_phase("unready")["reason"] == reason
        assert service.get("/ready")[0] == 503


def test_orphans_are_reaped(serving):
    with serving.run(core=True) as service:
        service.until_phase("ready")
        time.sleep(0.5)  # by now the third process has ended
        ((leash, *_), *processes) = below(service.process.pid)
        assert len(processes) == 2, "the engine and its second process, and nothing dead"
        assert {parent for _pid, parent, _state in processes} == {leash}, "an orphan has come to it"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_engine_drain_and_leaves_nothing(serving, number):
    serving.start(core=True, drain=1)
    serving.until_phase("ready")
    assert not serving.core_is_gone()
    serving.process.send_signal(number)
    serving.until_phase("stopping")
    code, stdout, stderr = serving.end()
    assert code == 0
    assert stdout.endswith(b"draining\ndrained\n")
    assert serving.core_is_gone()
    assert json.loads(serving.state_file.read_text())["phase"] == "stopped"
    assert "aerie: stopping; a stop was asked for" in stderr
    # Here neither vLLM nor a record is installed; what it says of them is tested with `aerie patches`.
    assert "aerie: vLLM is not installed, and no series of patches is recorded\n" in stderr


@pytest.mark.parametrize("impatient", [("--drain-timeout", "1"), ()])
def test_a_drain_ends_at_its_limit_or_at_a_second_signal(serving, impatient):
    serving.start(*impatient, drain=60)
    serving.until_phase("ready")
    begun = time.monotonic()
    serving.process.terminate()
    if not impatient:
        serving.until_phase("stopping")
        serving.process.terminate()
    code, stdout, _ = serving.end()
    assert (code, b"drained" in stdout) == (0, False)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(("phase", "stub"), [("starting", {"hang": True}), ("failed", {"exit": 1})])
def test_a_stop_while_it_starts_and_while_it_pauses(serving, phase, stub):
    serving.start(**stub)
    serving.until(lambda: serving.state()["phase"] == phase and serving.state()["engine"]["starts"], phase)
    serving.process.terminate()
    assert serving.end()[0] == 0


def test_a_stop_during_its_own_imports_is_not_lost(serving):
    serving.start()
    status = Path(f"/proc/{serving.process.pid}/status")
    serving.until(lambda: re.search(r"SigBlk:\s+0*4002$", status.read_text(), re.MULTILINE), "the blocked signals", 5)
    serving.process.terminate()
    assert serving.end()[0] == 0
    assert not (serving.directory / "argv.json").exists(), "no engine is started after a stop"


def test_the_engine_gets_its_signals(serving):
    with serving.run() as service:
        pid = service.until_phase("ready")["engine"]["pid"]
        status = Path(f"/proc/{pid}/status").read_text()
    assert re.search(r"^SigBlk:\s+0+$", status, re.MULTILINE)


def test_output_passes_byte_for_byte_however_slowly_it_is_read(serving):
    written = os.urandom(3_000_000) + b"\nDo you wish to run the custom code? [y/N] "
    file = serving.directory / "output"
    file.write_bytes(written)
    serving.start("--once", writes=str(file), exit=0)
    serving.until(lambda: serving.state()["phase"] == "starting", "a status that no slow reader holds up")
    time.sleep(1)  # everything waits for us now, and the pipe is full
    assert serving.state()["phase"] == "starting"
    code, stdout, _ = serving.end()
    assert code == 0
    assert stdout == written


def test_a_reader_that_went_away_does_not_end_the_service(serving):
    file = serving.directory / "output"
    file.write_bytes(b"x" * 300_000)
    serving.start(writes=str(file))
    serving.process.stdout.close()
    try:
        serving.until_phase("ready")
    finally:
        serving.process.terminate()
        serving.process.wait(20)
        serving.close()


@pytest.mark.parametrize(("stub", "code"), [
    ({"exit": 0}, 0),
    ({"says": "vllm: error: unrecognized arguments: --x", "exit": 2}, 2),
    ({"says": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "exit": 1}, 3),
    ({"says": "RuntimeError: CUDA error: unspecified launch failure", "exit": 1}, 4),
    ({"says": "ZeroDivisionError: nobody has seen this one", "exit": 1}, 5),
    ({"signal": signal.SIGKILL}, 137),
    ({"signal": signal.SIGSEGV}, 5),
])  # fmt: skip
def test_with_once_the_exit_code_tells_what_sort_of_failure_it_was(serving, stub, code):
    serving.start("--once", **stub)
    assert serving.end()[0] == code


def test_an_unknown_root_cause_is_the_reason(serving):
    with serving.run(says="ZeroDivisionError: nobody has seen this one", exit=1) as service:
        state = service.until_phase("failed")
    assert state["reason"] == "vllm serve ended with exit code 1: ZeroDivisionError: nobody has seen this one"


@pytest.mark.parametrize(
    ("says", "code"),
    [("vllm: error: unrecognized arguments: --x", 2), ("OSError: [Errno 98] Address already in use", 1)],
)
def test_what_another_start_cannot_cure_is_held_with_its_diagnosis(serving, says, code):
    with serving.run(says=says, exit=code) as service:
        state = service.until_phase("held")
        assert service.get("/ready")[0] == 503
    assert state["diagnosis"]["kind"] == "configuration"
    assert state["diagnosis"]["root"]["text"] == says
    assert state["reason"] == f"vllm serve ended with exit code {code}: {state['diagnosis']['title']}"
    assert (state["next_start"], state["failures"]) == (None, 0)


def held(serving, *options, **keywords):
    """Return what holds a service, seen both ways: running on, and with --once."""
    with serving.run(*options, **keywords) as service:
        reason = service.until_phase("held")["reason"]
    serving.start("--once", *options, **keywords)
    code, _, stderr = serving.end()
    assert code == 2
    assert reason in stderr
    assert len(stderr.strip().splitlines()) == 1
    return reason


def test_a_missing_key_file_is_held(serving):
    serving.keys.unlink()
    assert held(serving).startswith(f"key file {serving.keys} does not exist: ")


def test_a_key_file_without_a_key_is_held(serving):
    serving.keys.write_text("# none\n")
    assert held(serving).startswith(f"key file {serving.keys} holds no key: ")


def test_a_missing_model_is_held(serving):
    assert held(serving, model="/no/such/model").startswith("model /no/such/model does not exist: ")


def test_an_api_key_argument_is_held(serving):
    assert held(serving, arguments=["--api-key", "secret"]).startswith("engine argument --api-key is refused: ")


def test_one_port_for_both_is_held(serving):
    serving.api_port = serving.status_port
    assert held(serving).startswith(f"port {serving.status_port} is given to both")


def test_a_missing_vllm_is_held(serving):
    (serving.directory / "bin" / "vllm").unlink()
    (serving.directory / "bin" / "vllm").write_text("no program")
    (serving.directory / "bin" / "vllm").chmod(0o755)
    assert held(serving).startswith("vllm cannot be started: ")


def test_a_taken_status_port_ends_it_with_the_remedy(serving):
    with serving.run() as service:
        service.until_phase("ready")
        first = service.process
        service.start()
        code, _, stderr = service.end()
        service.process = first
    assert code == 1
    assert "address already in use; choose another --status-port" in stderr
    assert f"{serving.status_port}" in stderr
    assert len(stderr.splitlines()) == 1


def test_failures_are_counted_over_restarts_of_the_container(serving):
    for failures in (1, 2):
        with serving.run(exit=1) as service:
            assert service.until_phase("failed")["failures"] == failures


def test_a_state_that_cannot_be_written_does_not_end_the_service(serving):
    serving.state_file.mkdir()
    serving.start(serves="kimi")
    serving.until_phase("ready")
    serving.process.terminate()
    code, _, stderr = serving.end()
    assert code == 0
    assert stderr.count("cannot write") == 1
