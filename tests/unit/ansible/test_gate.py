"""The action plugin `gate`, driven by ansible-playbook itself; the service's state is what a test says it is."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[3]
PATIENCE = 240.0  # seconds
PROGRESS = "26 of 64 shards, 41%, waiting for rank 3: 41.2 GB read"
# In place of Docker: the real `aerie`, as if it ran in the container, asks the test's status port.
DOCKER = """#!/bin/sh
echo "$PWD $*" >>{directory}/calls
eval "$TROUBLE"
if [ -e {directory}/trouble ]; then . {directory}/trouble; fi
case "$*" in
  "exec kimi aerie "*) shift 2 ;;
  "compose exec -T vllm aerie "*) shift 4 ;;
  *) echo "unknown: $*" >&2; exit 1 ;;
esac
shift
PYTHONPATH={source} exec {python} -m aerie.cli "$@" {url}/"$SERVICE"
"""


class Play:
    """One playbook of gates, in a directory of its own."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory = directory
        self.project = directory / "a project"
        self.project.mkdir()
        self.calls, self.trouble, self.cut = directory / "calls", directory / "trouble", directory / "cut"
        docker = directory / "bin" / "docker"
        docker.parent.mkdir()
        docker.write_text(DOCKER.format(directory=directory, source=REPOSITORY / "src", python=sys.executable, url=url))
        docker.chmod(0o755)

    def task(
        self, service: str, /, trouble: str = "", keywords: dict[str, Any] | None = None, **gate: Any
    ) -> dict[str, Any]:
        """Return the task that waits for one of the services of the status port."""
        path = f"{self.directory}/bin:{os.environ['PATH']}"
        return {
            "name": f"Wait for {service}",
            "gate": gate or {"project_dir": str(self.project)},
            "environment": {"PATH": path, "SERVICE": service, "TROUBLE": trouble},
            **(keywords or {}),
        }

    def results(self) -> list[dict[str, Any]]:
        """Return what the tasks registered, in their order."""
        return list(json.loads((self.directory / "results.json").read_text()).values())

    @contextlib.contextmanager
    def play(self, *tasks: dict[str, Any], hosts: str = "alpha,", **settings: str) -> Iterator[subprocess.Popen[str]]:
        """Start ansible-playbook; its stdout and stderr are apart."""
        playbook = self.directory / "play.yml"
        registered = [f"'{number}': outcome_{number} | default(none)" for number in range(len(tasks))]
        save = {
            "name": "Save the results",
            "ansible.builtin.copy": {
                "content": f"{{{{ {{ {', '.join(registered)} }} }}}}",
                "dest": str(self.directory / "results.json"),
                "mode": "0600",
            },
            "delegate_to": "localhost",
            "vars": {"ansible_connection": "local"},
            "run_once": True,
        }
        block = [{**task, "register": f"outcome_{number}"} for number, task in enumerate(tasks)]
        playbook.write_text(
            yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [{"block": block, "always": [save]}]}])
        )
        environment = os.environ | {
            "ANSIBLE_ACTION_PLUGINS": str(REPOSITORY / "ansible/plugins/action"),
            "ANSIBLE_CONNECTION_PLUGINS": str(Path(__file__).parent / "connection_plugins"),
            "ANSIBLE_FLAKY_CUT": str(self.cut),
            "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
            "ANSIBLE_CALLBACK_RESULT_FORMAT": "yaml",
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_TRANSPORT": "local",
            **settings,
        }
        environment.pop("PYTHONUNBUFFERED", None)  # with which a pipe would show every line anyway
        process = subprocess.Popen(
            [sys.executable, "-m", "ansible", "playbook", "-i", hosts, str(playbook)],
            cwd=self.directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        # Nothing that a test reads from it may wait for ever.
        bound = threading.Timer(PATIENCE, os.killpg, (process.pid, signal.SIGKILL))
        bound.start()
        with process:
            try:
                yield process
            finally:
                bound.cancel()
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def play(tmp_path: Path, answers: dict[str, Any]) -> Play:
    return Play(tmp_path, answers["url"])


@pytest.fixture
def service(answers: dict[str, Any], say: Any) -> Any:
    """Let the service `kimi`, or the one that is named, say these states."""
    return lambda *states, name="kimi": say(answers, *states, path=f"/{name}/status")


def displayed(output: str, host: str = "alpha") -> list[str]:
    """Return what the gate displayed for a host, without the time."""
    lines = [line.split(maxsplit=2) for line in output.splitlines() if line.startswith(f"    {host} ")]
    return [line[2] for line in lines]


def until(process: subprocess.Popen[str], text: str) -> tuple[float, str]:
    """Read until a line has `text`; return the time then, and the line."""
    assert process.stdout
    for line in process.stdout:
        if text in line:
            return time.monotonic(), line
    pytest.fail(f"ended without {text!r}: {process.stderr and process.stderr.read()}")


def test_each_change_is_shown_with_the_host_while_it_waits(play: Play, service: Any, state: Any) -> None:
    service(state())
    with play.play(play.task("kimi")) as process:
        _, line = until(process, "loading target")
        assert displayed(line) == [f"loading target: {PROGRESS}; start 33%, about 9 min left"]
        # A container may go and come back.
        play.trouble.write_text("echo 'Error: Container 1f is restarting' >&2; exit 1")
        until(process, "the container does not answer: Error: Container 1f is restarting")
        service(state(start={"phase": "loading drafter", "waiting_for": None}), state(phase="ready"))
        play.trouble.unlink()
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    drafter, ready = displayed(rest)
    assert drafter.startswith("loading drafter; start 33%")
    assert ready.startswith("ready after ")
    result = play.results()[0]
    assert (result["changed"], result["failed"], result["ready"]) == (False, False, True)
    assert (result["verdict"], result["phase"], result["diagnosis"]) == ("ready", "ready", None)
    assert 0 < result["seconds"] < PATIENCE
    assert result["msg"] == ready
    first, *others = play.calls.read_text().splitlines()
    assert first == f"{play.project} compose exec -T vllm aerie wait --piece 10"
    assert all("--memory" in call for call in others)


def test_a_crash_fails_within_seconds_with_the_diagnosis_as_message(
    play: Play, service: Any, state: Any, diagnosis: dict[str, Any]
) -> None:
    service(state())
    with play.play(play.task("kimi")) as process:
        until(process, "loading target")
        time.sleep(1)
        began = time.monotonic()
        # What a log may hold, and YAML would not write as lines.
        awkward = diagnosis | {"text": f"{diagnosis['text']}\n\tat x.cu:3 \x07"}
        service(state(phase="failed", failures=1, reason="it died", diagnosis=awkward))
        told = until(process, "failed: it died")[0] - began
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert told < 3.0
    result = play.results()[0]
    assert result["msg"].startswith(f"failed: it died\n\n{diagnosis['text']}\n        at x.cu:3 ?\n\n")
    assert f"docker compose --project-directory '{play.project}' logs vllm" in result["msg"]
    assert (result["ready"], result["verdict"], result["phase"]) == (False, "failed", "failed")
    assert result["diagnosis"]["signature"] == diagnosis["signature"]
    assert result["diagnosis"]["root"]["line"] == 812
    # As lines that people can read, not as one with escapes.
    assert "    msg: |-\n        failed: it died\n\n        -----\n        DIAGNOSIS: vLLM refuses" in output


def test_a_connection_that_drops_out_loses_nothing(
    play: Play, service: Any, state: Any, diagnosis: dict[str, Any]
) -> None:
    service(state())
    play.cut.touch()
    with play.play(play.task("kimi"), ANSIBLE_TRANSPORT="flaky") as process:
        until(process, "out of reach, the start goes on: the cable is out")
        time.sleep(2)
        play.cut.unlink()
        until(process, "loading target")
        play.cut.touch()
        # Ends the piece that is under way.
        service(state(start={"phase": "loading drafter"}))
        until(process, "out of reach, the start goes on: the cable is out")
        # The engine fails and is starting again before anybody can look.
        service(state(failures=1, diagnosis=diagnosis))
        time.sleep(2)
        play.cut.unlink()
        rest, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "out of reach" not in rest
    result = play.results()[0]
    assert result["msg"].startswith("the engine failed and is starting again: loading target")
    assert diagnosis["text"] in result["msg"]


def test_many_hosts_wait_at_the_same_time(play: Play, service: Any, state: Any) -> None:
    hosts = ["alpha", "beta", "gamma", "delta"]
    for host in hosts:
        service(state(), name=host)
    # A callback that is built on `default` is for people as that one is.
    with play.play(
        play.task("{{ inventory_hostname }}"), hosts=",".join(hosts), ANSIBLE_STDOUT_CALLBACK="ansible.posix.debug"
    ) as process:
        seen: set[str] = set()
        while len(seen) < len(hosts):
            assert process.stdout
            line = process.stdout.readline()
            assert line, process.communicate()
            seen |= {host for host in hosts if line.startswith(f"    {host} ")}
        for host in hosts:
            service(state(phase="held" if host == "beta" else "ready", reason="no key"), name=host)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "fatal: [beta]: FAILED!" in output
    ends = {host: displayed(output, host)[-1].partition(" after")[0] for host in hosts}
    assert ends == {"alpha": "ready", "beta": "held: no key", "gamma": "ready", "delta": "ready"}


def test_nothing_is_added_to_output_for_programs(play: Play, service: Any, state: Any) -> None:
    service(state(), state(phase="ready"))
    with play.play(play.task("kimi"), ANSIBLE_STDOUT_CALLBACK="ansible.posix.json") as process:
        output, _ = process.communicate(timeout=PATIENCE)
    wait, _save = json.loads(output)["plays"][0]["tasks"]
    assert wait["hosts"]["alpha"]["ready"] is True


class Gallery(NamedTuple):
    """One play of many tasks that end by themselves: what each registered, what was printed, what Docker was asked."""

    results: dict[str, dict[str, Any]]
    output: str
    calls: str


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory, shared_answers: dict[str, Any], say: Any, state: Any) -> Gallery:
    play = Play(tmp_path_factory.mktemp("gallery"), shared_answers["url"])
    play.cut.touch()
    services = {
        "held": [state(phase="held", reason="key file /k holds no key")],
        "stalled": [state(), state(start={"stalled": True, "silent_seconds": 1800.0})],
        "secret": [state(start={"phase": "private progress"}), state(phase="ready")],
        "old schema": [{"schema": 1, "phase": "starting", "versions": {"aerie": "0.0.9"}}],
        "noisy": [state(start={"phase": "public progress"}), state(phase="ready")],
        "named": [state(phase="held", reason="no key")],
    }
    for name, states in services.items():
        say(shared_answers, *states, path=f"/{name.replace(' ', '-')}/status")
    project = {"project_dir": str(play.project)}
    away = {"vars": {"ansible_connection": "flaky"}, "ignore_unreachable": True}
    tasks: dict[str, dict[str, Any]] = {
        "held": {},
        "stalled": {},
        "secret": {"keywords": {"no_log": True}},
        "old schema": {},
        "noisy": {"trouble": 'echo Welcome; echo "{not json"; echo "[1]"'},
        "named": {"container": "kimi"},
        "checked": {"keywords": {"check_mode": True}},
        # What aerie 0.1.0 says.
        "old aerie": {"trouble": "echo 'aerie: error: unrecognized arguments: --piece' >&2; exit 2"},
        "no aerie": {"trouble": "echo 'exec: \"aerie\": executable file not found in $PATH' >&2; exit 127"},
        "no project": {"project_dir": "/no/such/place"},
        "down": {"trouble": "echo service vllm is not running >&2; exit 1", "absent_timeout": 3, **project},
        "restarting": {"trouble": "exit 137", "absent_timeout": 3, **project},
        "away": {"keywords": away, "unreachable_timeout": 1, **project},
        "neither": {"service": "vllm"},
        "both": {"project_dir": "/x", "container": "y"},
        "unknown": {"project_dir": "/x", "timeout": 5},
        "no number": {"project_dir": "/x", "absent_timeout": "soon"},
    }
    made = [play.task(name.replace(" ", "-"), **options) | {"ignore_errors": True} for name, options in tasks.items()]
    with play.play(*made) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output + errors
    return Gallery(dict(zip(tasks, play.results(), strict=True)), output, play.calls.read_text())


def test_a_held_service_fails_at_once(gallery: Gallery) -> None:
    result = gallery.results["held"]
    assert (result["failed"], result["verdict"], result["phase"]) == (True, "failed", "held")
    assert result["msg"].startswith("held: key file /k holds no key\n")
    assert result["seconds"] < 20


def test_a_stall_fails_when_the_service_says_so(gallery: Gallery) -> None:
    result = gallery.results["stalled"]
    assert (result["failed"], result["verdict"]) == (True, "stalled")
    assert result["msg"].startswith("nothing has moved for 30 min: loading target")


def test_a_secret_task_displays_nothing(gallery: Gallery) -> None:
    assert "public progress" in gallery.output
    assert "private progress" not in gallery.output


def test_check_mode_skips_it(gallery: Gallery) -> None:
    result = gallery.results["checked"]
    assert (result["skipped"], result["changed"]) == (True, False)
    assert "--piece 10" in gallery.calls
    assert "checked" not in gallery.calls


def test_a_state_in_another_schema_is_told_at_once(gallery: Gallery) -> None:
    result = gallery.results["old schema"]
    assert "schema 1 (aerie 0.0.9)" in result["msg"]
    assert (result["verdict"], result["phase"]) == ("nobody", None)
    assert result["seconds"] < 20


def test_what_a_login_prints_is_no_answer(gallery: Gallery) -> None:
    assert gallery.results["noisy"]["ready"] is True


def test_a_container_by_name(gallery: Gallery) -> None:
    assert "docker logs kimi" in gallery.results["named"]["msg"]
    assert "\n/ exec kimi aerie wait " in gallery.calls


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("old aerie", "of another version than this play"),
        ("no aerie", "executable file not found"),
        ("no project", "/no/such/place"),
    ],
)
def test_what_cannot_become_a_service_is_told_at_once(gallery: Gallery, name: str, said: str) -> None:
    result = gallery.results[name]
    assert said in result["msg"]
    assert (result["failed"], result["verdict"]) == (True, "nobody")
    assert result["seconds"] < 20


@pytest.mark.parametrize(
    ("name", "said"), [("down", "service vllm is not running, for "), ("restarting", "exit status 137, for ")]
)
def test_a_container_that_does_not_come_is_told_with_docker_s_words(gallery: Gallery, name: str, said: str) -> None:
    result = gallery.results[name]
    assert (result["failed"], result["verdict"], result["phase"]) == (True, "nobody", None)
    assert said in result["msg"]
    assert result["seconds"] < 30
    assert len([line for line in displayed(gallery.output) if said.removesuffix(", for ") in line]) == 1


def test_what_the_connection_says_of_itself_does_not_hide_docker_s_words(play: Play) -> None:
    troubles = ("echo no such service >&2; exit 1", "exit 137")
    ends = {"project_dir": str(play.project), "absent_timeout": 0}
    tasks = [play.task("kimi", trouble=trouble, **ends) | {"ignore_errors": True} for trouble in troubles]
    with play.play(*tasks, ANSIBLE_TRANSPORT="flaky") as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output + errors
    told = [result["msg"].splitlines()[0] for result in play.results()]
    assert told == [
        "the container does not answer: no such service, for 0 s",
        "the container does not answer: exit status 137 (Warning: the cable is old), for 0 s",
    ]


def test_a_host_that_stays_away_is_unreachable(gallery: Gallery) -> None:
    result = gallery.results["away"]
    assert result["unreachable"] is True
    assert "the cable is out" in result["msg"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("neither", "project_dir, container"),
        ("both", "mutually exclusive"),
        ("unknown", "timeout"),
        ("no number", "absent_timeout"),
    ],
)
def test_parameters_are_checked(gallery: Gallery, name: str, said: str) -> None:
    result = gallery.results[name]
    assert result["failed"] is True
    assert said in result["msg"]
