"""`aerie serve` from outside, as Docker and a user drive it."""

import array
import asyncio
import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import termios
import threading
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aerie import __version__, cli
from aerie.supervisor import gpus
from aerie.supervisor import service as service_module
from aerie.supervisor.arguments import ConfigurationError
from aerie.supervisor.release import held_back
from aerie.supervisor.run import EngineRun
from aerie.supervisor.service import Options, _Service
from aerie.supervisor.state import SCHEMA

GIB = 2**30


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
        service.until_kept("ready")
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(service.get("/metrics")[1])
            for sample in family.samples
        }
        assert samples["aerie_ready",] == samples["aerie_phase", "ready"] == samples["aerie_engine_starts_total",] == 1
        assert samples["aerie_phase", "failed"] == samples["aerie_engine_failures",] == 0


def test_the_engine_gets_the_middleware_the_key_file_time_and_its_signals_but_no_key(serving):
    with serving.run("--drain-timeout", "5") as service:
        pid = service.until_phase("ready")["engine"]["pid"]
        status = Path(f"/proc/{pid}/status").read_text()
        argv = json.loads((service.directory / "argv.json").read_text())
        environ = json.loads((service.directory / "environ.json").read_text())
    assert argv[:2] == ["serve", "org/model"]
    assert argv[-2:] == ["--middleware", "aerie.auth.ApiKeyMiddleware"]
    assert environ["AERIE_API_KEYS_FILE"] == str(service.keys)
    assert environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "86400"
    assert environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] == "1800"
    told = json.dumps([argv, environ]) + service.state_file.read_text()
    assert "test-key" not in told
    assert re.search(r"^SigBlk:\s+0+$", status, re.MULTILINE)


def test_a_killed_engine_is_told_at_once_and_started_again_when_nothing_of_it_is_left(serving):
    with serving.run(core=True) as service:
        first = service.until_phase("ready")["engine"]["pid"]
        assert not service.core_is_gone()
        os.kill(first, signal.SIGKILL)
        service.until(lambda: service.get("/ready")[0] == 503, "/ready to say no")
        failed = service.until_phase("failed")
        assert failed["reason"].startswith("vllm serve was killed by SIGKILL: ")
        assert failed["diagnosis"]["title"] in service.get("/")[1]
        assert failed["engine"]["exit"]["signal"] == "SIGKILL"
        assert failed["next_start"]
        assert json.loads(service.get("/ready")[1]) == {
            "ready": False,
            "phase": "failed",
            "reason": failed["reason"],
        }
        service.until(service.core_is_gone, "all of it to be gone")
        service.retry_at_once()
        again = service.until_phase("ready")
        assert (again["engine"]["starts"], again["failures"]) == (2, 1)
        assert again["engine"]["pid"] != first
        assert not (service.directory / "two-cores").exists()


def diagnosis_in(stderr):
    """Return the title of the report that ends `stderr`; there must be one, and nothing after it."""
    rule = "-" * 100
    assert stderr.endswith(f"{rule}\n"), stderr
    return re.search(rf"^{rule}\nDIAGNOSIS: (.*)$", stderr, re.MULTILINE)[1]


def test_what_has_served_is_started_again_though_it_ends_like_one_that_never_could(serving):
    with serving.run(last="OSError: [Errno 98] Address already in use") as service:
        os.kill(service.until_phase("ready")["engine"]["pid"], signal.SIGUSR2)
        state = service.until_phase("failed")
    assert (state["diagnosis"]["kind"], state["failures"]) == ("configuration", 1)


def test_an_engine_that_says_it_is_dying_is_not_waited_for(serving):
    says = "\n".join(
        f"(EngineCore pid=7) ERROR 11-29 13:49:24 [core.py:1100] {line}"
        for line in ("EngineCore failed to start.", "Traceback (most recent call last):", "ZeroDivisionError: new")
    )
    serving.start("--once", says=says, hang=True)
    code, _, stderr = serving.end()
    assert code == 5
    assert "aerie: failed; vllm serve reported a fatal error: ZeroDivisionError: new" in stderr
    assert "  > ZeroDivisionError: new" in stderr
    diagnosis_in(stderr)


def test_a_crash_is_told_last_and_kept_over_the_containers_life(serving):
    says = "ZeroDivisionError: nobody has seen this one"
    with serving.run(says=says, exit=1) as service:
        state = service.until_phase("failed")
        shown = state["diagnosis"]
        assert shown["root"]["text"] == says
        assert state["reason"] == f"vllm serve ended with exit code 1: {says}"
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
        service.retry_at_once()
        service.until_phase("ready")
        assert service.state()["diagnosis"] is None
    assert report.exists()


def test_a_start_in_which_nothing_moves_is_ended_as_hung(serving):
    serving.start("--once", "--stall-timeout", "0.2", hang=True)
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
        service.until_kept("held")
        (serving.directory / "elsewhere").rename(serving.keys)
        assert service.retry() == (0, f"asked for the next start; the service was held: {reason}")
        service.until_phase("ready")
        service.until_kept("ready")
        file = service.state_file
        told = f"aerie: nothing to retry: the service is ready, as {file} has it; asked all the same"
        assert service.retry() == (1, told)


def test_a_pause_ends_by_a_retry(serving):
    fifth = {"schema": SCHEMA, "phase": "stopped", "failures": 5}  # and so the pause after the next takes five minutes
    serving.state_file.write_text(json.dumps(fifth))
    with serving.run(exit=1) as service:
        service.until_kept("failed")
        assert service.retry()[0] == 0
        service.until(lambda: service.state()["engine"]["starts"] == 2, "the next start")
        assert service.until_phase("failed")["failures"] == 7


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


def test_orphans_are_collected_and_nothing_outlives_a_supervisor_that_is_killed(serving):
    serving.start(core=True, deaf=True)
    serving.until_phase("ready")
    serving.until(lambda: len(below(serving.process.pid)) == 3, "leash, engine and its second process alone")
    ((leash, *_), *processes) = below(serving.process.pid)
    assert {parent for _pid, parent, _state in processes} == {leash}, "an orphan has come to it"
    serving.process.kill()
    serving.process.wait()
    serving.until(serving.core_is_gone, "the second process to be gone")
    alive = {leash, *(pid for pid, *_ in processes)}
    serving.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in alive), "all to be gone")
    serving.close()


def test_healthy_is_not_ready(serving):
    with serving.run(serves="other") as service:
        assert service.until_phase("unready")["reason"] == "/v1/models offers other, and not kimi"
        assert service.get("/ready")[0] == 503


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_engine_drain_and_leaves_nothing(serving, number):
    serving.start(core=True, drain=0.2)
    serving.until_phase("ready")
    assert not serving.core_is_gone()
    serving.process.send_signal(number)
    code, stdout, stderr = serving.end()
    assert code == 0
    assert stdout.endswith(b"draining\ndrained\n")
    assert serving.core_is_gone()
    assert serving.kept_state()["phase"] == "stopped"
    assert "aerie: stopping; a stop was asked for" in stderr
    # Here neither vLLM nor a record is installed; what it says of them is tested with `aerie patches`.
    assert "aerie: vLLM is not installed, and no series of patches is recorded\n" in stderr


def test_a_drain_ends_at_a_second_signal(serving):
    serving.start("--drain-timeout", "600", drain=600)
    serving.until_phase("ready")
    serving.process.terminate()
    serving.until_phase("stopping")
    serving.process.terminate()
    code, stdout, _ = serving.end()
    assert (code, b"drained" in stdout) == (0, False)


@pytest.mark.parametrize(("phase", "stub"), [("starting", {"hang": True}), ("failed", {"exit": 1})])
def test_a_stop_while_it_starts_and_while_it_pauses(serving, phase, stub):
    serving.start(**stub)
    serving.until(lambda: serving.state()["phase"] == phase and serving.state()["engine"]["starts"], phase)
    serving.process.terminate()
    assert serving.end()[0] == 0


def test_a_stop_during_its_own_imports_is_not_lost(serving):
    serving.start()
    status = Path(f"/proc/{serving.process.pid}/status")
    serving.until(lambda: re.search(r"SigBlk:\s+0*4002$", status.read_text(), re.MULTILINE), "the blocked signals")
    serving.process.terminate()
    assert serving.end()[0] == 0
    assert not (serving.directory / "argv.json").exists(), "no engine is started after a stop"


def unread(pipe):
    """Return how many bytes wait in a pipe."""
    waiting = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, waiting)
    return waiting[0]


def test_output_passes_byte_for_byte_however_slowly_it_is_read(serving):
    written = os.urandom(3_000_000) + b"\nDo you wish to run the custom code? [y/N] "
    file = serving.directory / "output"
    file.write_bytes(written)
    serving.start("--once", writes=str(file), exit=0)
    serving.until(lambda: serving.state()["phase"] == "starting", "a status that no slow reader holds up")
    serving.until(lambda: unread(serving.process.stdout), "output that waits for us")
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
        serving.process.wait(serving.PATIENCE)
        serving.close()


def test_with_once_the_exit_code_tells_what_sort_of_failure_it_was(serving):
    serving.start("--once", signal=signal.SIGKILL)
    assert serving.end()[0] == 137


def test_what_another_start_cannot_cure_is_held_with_its_diagnosis(serving):
    says = "OSError: [Errno 98] Address already in use"
    with serving.run(says=says, exit=1) as service:
        state = service.until_phase("held")
        assert service.get("/ready")[0] == 503
    assert state["diagnosis"]["kind"] == "configuration"
    assert state["diagnosis"]["root"]["text"] == says
    assert state["reason"] == f"vllm serve ended with exit code 1: {state['diagnosis']['title']}"
    assert (state["next_start"], state["failures"]) == (None, 0)


def test_what_cannot_work_is_held_and_with_once_ends_in_one_line(serving):
    serving.keys.unlink()
    serving.start("--once")
    code, _, stderr = serving.end()
    assert code == 2
    (line,) = stderr.splitlines()
    assert line.startswith(f"aerie: held; key file {serving.keys} does not exist: ")


def test_a_missing_vllm_is_held(serving):
    (serving.directory / "bin" / "vllm").unlink()
    (serving.directory / "bin" / "vllm").write_text("no program")
    (serving.directory / "bin" / "vllm").chmod(0o755)
    serving.start("--once")
    code, _, stderr = serving.end()
    assert (code, stderr.startswith("aerie: held; vllm cannot be started: ")) == (2, True)


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Return the service in this process, for what no engine is needed."""
    (tmp_path / "api-keys").write_text("key\n")
    monkeypatch.setattr(EngineRun, "until_it_ends", None)

    def make(*given):
        options = Options(
            engine_arguments=list(given) or ["org/model"],
            once=False,
            state_dir=tmp_path,
            cache_dir=tmp_path,
            status_host="127.0.0.1",
            status_port=8001,
            keys_file=tmp_path / "api-keys",
            drain_timeout=90,
            stall_timeout=900,
        )
        service = _Service(options)
        service._reaper = None
        return service

    return make


def fails_to_start(number):
    async def until_it_ends(*_):
        raise OSError(number, os.strerror(number))

    return until_it_ends


@pytest.mark.parametrize(
    ("number", "phase", "code"),
    [(errno.ENOENT, "held", 2), (errno.ENOEXEC, "held", 2), (errno.EAGAIN, "failed", 5), (errno.ENOMEM, "failed", 5)],
)
def test_only_a_vllm_that_is_not_there_is_held(service, monkeypatch, number, phase, code):
    monkeypatch.setattr(EngineRun, "until_it_ends", fails_to_start(number))
    one = service()
    assert asyncio.run(one._start_and_see()) == code
    state = one.snapshot()
    assert (state["phase"], state["failures"]) == (phase, int(phase == "failed"))
    assert state["reason"].startswith(f"vllm cannot be started: {os.strerror(number)}")
    assert ("must be installed" in state["reason"]) == (phase == "held")


@pytest.fixture
def used(monkeypatch):
    """Stand in for the GPUs' memory in use: the last reading counts, and none is waited for. No engine comes up."""
    readings = []
    monkeypatch.setattr(gpus, "used_bytes", lambda: readings[-1])
    monkeypatch.setattr(service_module, "held_back", partial(held_back, released_within=0))
    monkeypatch.setattr(EngineRun, "until_it_ends", fails_to_start(errno.EAGAIN))
    return readings


def test_what_another_program_took_holds_only_until_a_retry(service, used):
    used.append((GIB,))

    async def live():
        one = service()
        await one._start_and_see()
        used.append((3 * GIB,))
        assert await one._start_and_see() == 4
        held = one.snapshot()
        waiting = asyncio.create_task(one._may_start())
        await asyncio.sleep(0)
        one._try_again()
        assert await waiting
        await one._start_and_see()
        return held, one.snapshot()

    held, retried = asyncio.run(live())
    assert held["phase"] == "held"
    assert "GPU 0: 3072 MiB are in use" in held["reason"]
    assert "nvidia-smi" in held["reason"]
    assert retried["phase"] == "failed", "an engine was tried, though the memory is still in use"


def test_a_driver_that_never_answers_holds_up_neither_a_start_nor_a_stop(service, monkeypatch, caplog):
    answers = threading.Event()
    monkeypatch.setattr(gpus, "used_bytes", lambda: answers.wait(120))
    monkeypatch.setattr(EngineRun, "until_it_ends", fails_to_start(errno.EAGAIN))

    async def stop():
        one = service()
        starting = asyncio.create_task(one._start_and_see())
        await asyncio.sleep(0.05)
        one._stop("SIGTERM")
        return await asyncio.wait_for(starting, 60)

    assert asyncio.run(stop()) == 0
    monkeypatch.setattr(service_module, "_GPUS_ANSWER_WITHIN", 0.05)
    assert asyncio.run(service()._start_and_see()) == 5
    answers.set()
    assert "the GPUs' driver has not answered in 0 s" in caplog.text


def test_gpus_that_did_not_answer_are_asked_again_before_the_next_start(service, used):
    used.append(())

    async def twice():
        one = service()
        await one._start_and_see()
        used.append((GIB,))
        await one._start_and_see()
        used.append((3 * GIB,))  # and from now on counts what it was then
        await one._start_and_see()
        return one._gpus.used

    assert asyncio.run(twice()) == (GIB,)


def test_a_retry_counts_whatever_an_old_state_file_says(serving):
    serving.keys.rename(serving.directory / "elsewhere")
    with serving.run() as service:
        service.until_phase("held")
        service.until_kept("held")
        (serving.directory / "elsewhere").rename(serving.keys)
        old = service.kept_state() | {"phase": "ready"}
        service.state_file.write_text(json.dumps(old))
        code, said = service.retry()
        assert (code, said.startswith("aerie: nothing to retry: the service is ready, as ")) == (1, True)
        service.until_phase("ready")


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_status_host_that_cannot_be_one_is_told_in_one_line(serving, host):
    serving.start("--status-host", host)
    code, _, stderr = serving.end()
    assert (code, len(stderr.splitlines())) == (1, 1), stderr
    assert f"cannot serve the status on {host}:" in stderr


@pytest.mark.parametrize(
    ("given", "keys", "refusal"),
    [
        (["org/model"], "# none\n", "key file .* holds no key: "),
        (["/no/such/model"], "key\n", "model /no/such/model does not exist: "),
        (["org/model", "--api-key", "secret"], "key\n", "engine argument --api-key is refused: "),
        (["org/model", "--shutdown-timeout", "7"], "key\n", "--shutdown-timeout"),
        (["org/model", "--port", "8001"], "key\n", "port 8001 is given to both"),
    ],
)
def test_everything_is_checked_before_an_engine_starts(service, tmp_path, given, keys, refusal):
    (tmp_path / "api-keys").write_text(keys)
    with pytest.raises(ConfigurationError, match=refusal):
        service(*given)._configuration()


def test_a_taken_status_port_ends_it_with_the_remedy(serving):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", serving.status_port))
        taken.listen()
        serving.start()
        code, _, stderr = serving.end()
    assert code == 1
    assert "address already in use; choose another --status-port" in stderr
    assert f"{serving.status_port}" in stderr
    assert len(stderr.splitlines()) == 1


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


@pytest.mark.parametrize("given", ["0", "-1", "65536", "99999", "9" * 5000, "http"])
def test_a_status_port_is_a_port(capsys, given):
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--status-port={given}"])
    assert "is none: a port is a number from 1 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["soon", "1.5", "-1"])
def test_a_drain_timeout_is_whole_seconds(capsys, given):
    with pytest.raises(SystemExit):
        cli.main(["serve", f"--drain-timeout={given}"])
    assert f"{given!r} is no whole number of seconds" in capsys.readouterr().err
