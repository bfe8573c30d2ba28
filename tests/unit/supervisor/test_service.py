"""`aerie serve` from outside, as Docker and a user drive it."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie import __version__, cli


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
        service.until(lambda: service.kept_state()["phase"] == "ready", "the state file")
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
        service.until(service.core_is_gone, "all of it to be gone", limit=5)
        again = service.until_phase("ready", limit=25)
        assert (again["engine"]["starts"], again["failures"]) == (2, 1)
        assert again["engine"]["pid"] != first
        assert not (service.directory / "two-cores").exists()


def diagnosis_in(stderr):
    """Return the title of the report that ends `stderr`; there must be one, and nothing after it."""
    rule = "-" * 100
    assert stderr.endswith(f"{rule}\n"), stderr
    return re.search(rf"^{rule}\nDIAGNOSIS: (.*)$", stderr, re.MULTILINE)[1]


@pytest.mark.parametrize("title", ["VLLM::EngineCore", "VLLM::Worker_TP1"])
def test_a_vital_process_that_dies_is_told_within_two_seconds_though_the_api_server_lives_on(serving, title):
    with serving.run(vital=title) as service:
        service.until_phase("ready")
        victim = int((service.directory / "vital.pid").read_text())
        time.sleep(1.2)  # new processes are looked for once a second
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        service.until(lambda: service.get("/ready")[0] == 503, "/ready to say no", limit=1)
        state = service.until_phase("failed")
        assert time.monotonic() - killed < 2
    assert state["reason"] == f"{title} (pid {victim}) died: {state['diagnosis']['title']}"
    assert state["diagnosis"]["kind"] == "killed"
    assert state["engine"]["exit"] is None, "the supervisor ended what was left"


def test_an_engine_that_says_it_is_dying_is_not_waited_for(serving):
    says = "\n".join(
        f"(EngineCore pid=7) ERROR 11-29 13:49:24 [core.py:1100] {line}"
        for line in ("EngineCore failed to start.", "Traceback (most recent call last):", "ZeroDivisionError: new")
    )
    begun = time.monotonic()
    serving.start("--once", says=says, hang=True)
    code, _, stderr = serving.end()
    assert code == 5
    assert time.monotonic() - begun < 15
    assert "aerie: failed; vllm serve reported a fatal error: ZeroDivisionError: new" in stderr
    assert "  > ZeroDivisionError: new" in stderr
    diagnosis_in(stderr)


def test_a_crash_is_told_last_and_kept_over_the_containers_life(serving):
    says = "ZeroDivisionError: nobody has seen this one"
    with serving.run(says=says, exit=1) as service:
        state = service.until_phase("failed")
        shown = state["diagnosis"]
        assert shown["root"]["text"] == says
        service.until(lambda: service.kept_state()["diagnosis"] == shown, "the state file")
        report = Path(shown["report"])
        assert report.parent == service.state_file.parent / "crashes"
        assert report.read_text().startswith("-" * 100)
        assert report.read_text().endswith(f"The engine's last output:\n\n{says}\n\n")
        service.process.kill()
        service.process.wait()
        stderr = service.process.stderr.read().decode()
        service.close()
        assert f"kept in {report}\n" in stderr
        diagnosis_in(stderr)
        # Another container on the same volume: the pause goes on, and so does the page.
        service.start()
        state = service.until_phase("failed")
        assert state["diagnosis"] == shown
        service.until_phase("ready")
        assert service.state()["diagnosis"] is None
    assert report.exists()


def test_a_start_in_which_nothing_moves_is_ended_as_hung(serving):
    serving.start("--once", "--stall-timeout", "1.5", hang=True)
    code, _, stderr = serving.end()
    assert code == 6
    assert "the start has stalled: nothing moved for " in stderr
    diagnosis_in(stderr)
    state = serving.kept_state()
    assert (state["diagnosis"]["kind"], state["hangs"]) == ("hung", 1)
    assert state["start"]["stalled"]


def test_how_long_a_start_took_is_remembered_for_the_next(serving):
    settings = "(v0.32.0) with config: model='m', enforce_eager=True, compilation_config="
    says = f"(EngineCore pid=7) INFO 11-29 13:35:03 [core.py:114] Initializing a V1 LLM engine {settings}"
    with serving.run(says=says) as service:
        state = service.until_phase("ready")
        assert state["start"]["fraction"] == 1
        assert state["start"]["ended"]
        kept = json.loads((service.directory / "cache" / "starts.json").read_text())
    (start,) = kept["starts"].values()
    assert "answering" in start[0]


def test_a_hold_ends_by_a_retry_which_reads_the_configuration_anew(serving):
    serving.keys.rename(serving.directory / "elsewhere")
    with serving.run() as service:
        reason = service.until_phase("held")["reason"]
        service.until(lambda: service.kept_state()["phase"] == "held", "the state file")
        before = service.state()["since"]
        time.sleep(1.1)  # times are told in seconds
        assert service.retry()[0] == 0
        service.until(lambda: service.until_phase("held")["since"] > before, "a hold anew, for what waits to see it")
        service.until(lambda: service.kept_state()["phase"] == "held", "the state file")
        (serving.directory / "elsewhere").rename(serving.keys)
        assert service.retry() == (0, f"asked for the next start; the service was held: {reason}")
        service.until_phase("ready")
        service.until(lambda: service.kept_state()["phase"] == "ready", "the state file")
        assert service.retry() == (1, "aerie: nothing to retry: the service is ready")


def test_a_pause_ends_by_a_retry(serving):
    with serving.run(exit=1) as service:
        service.until_phase("failed")
        service.until(lambda: service.kept_state()["phase"] == "failed", "the state file")
        assert service.retry()[0] == 0
        service.until(lambda: service.state()["engine"]["starts"] == 2, "the next start", limit=8)
        assert service.until_phase("failed")["failures"] == 2


def test_a_retry_where_nothing_runs_says_so(serving):
    code, said = serving.retry()
    assert (code, said) == (
        1,
        f"aerie: no service keeps its state here: {serving.state_file}: No such file or directory; see --state-dir",
    )
    serving.state_file.write_text('{"schema": 1}')
    assert serving.retry() == (1, f"aerie: {serving.state_file} is not the state of this version of Aerie")
    other = subprocess.Popen(["sleep", "60"])
    state = {"supervisor": {"pid": other.pid}, "phase": "held", "reason": "x"}
    serving.state_file.write_text(json.dumps(state))
    code, said = serving.retry()
    assert other.poll() is None, "a stranger's process was signalled"
    other.kill()
    other.wait()
    assert (code, said.startswith("aerie: no `aerie serve` runs here: ")) == (1, True)


def test_a_stop_while_it_loads_takes_less_than_ten_seconds_of_an_engine_that_is_deaf(serving):
    serving.start(hang=True, deaf=True, core=True)
    serving.until((serving.directory / "core.lock").exists, "the engine")
    begun = time.monotonic()
    serving.process.terminate()
    assert serving.end()[0] == 0
    assert time.monotonic() - begun < 10
    assert serving.core_is_gone()


def test_nothing_outlives_a_supervisor_that_is_killed(serving):
    serving.start(core=True, deaf=True)
    serving.until_phase("ready")
    processes = below(serving.process.pid)
    assert len(processes) == 3, "leash, engine and its second process"
    serving.process.kill()
    serving.process.wait()
    serving.until(serving.core_is_gone, "the second process to be gone", limit=5)
    alive = {pid for pid, *_ in processes}
    serving.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in alive), "all to be gone", limit=5)
    serving.close()


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
    assert serving.kept_state()["phase"] == "stopped"
    assert "aerie: stopping; a stop was asked for" in stderr
    # Here neither vLLM nor a record is installed; what it says of them is tested with `aerie patches`.
    assert "aerie: vLLM is not installed, and no series of patches is recorded\n" in stderr


def test_a_drain_ends_at_a_second_signal(serving):
    serving.start(drain=60)
    serving.until_phase("ready")
    begun = time.monotonic()
    serving.process.terminate()
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
    assert serving.end()[1] == written


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
    ({"exit": 0}, 5),
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


def test_the_command_line_names_the_exit_codes_as_they_are(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for code, kind in ((2, "wrong"), (3, "out of memory"), (4, "hardware"), (5, "engine crash"), (6, "hung")):
        assert f" {code} {kind}" in said


@pytest.mark.parametrize("given", ["soon", "1.5", "-1"])
def test_a_drain_timeout_is_whole_seconds(capsys, given):
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--drain-timeout={given}"])
    assert f"{given!r} is no whole number of seconds" in capsys.readouterr().err
