"""`aerie fabric`: what is tried in which environment, its exit codes, and that nothing is left of it."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from aerie import cli
from aerie.fabric import command
from aerie.fabric.all_reduce import Reduction, State
from aerie.fabric.pairs import Pair, Tried, in_rounds
from aerie.fabric.pairs import State as Moved
from aerie.fabric.sizes import REDUCTIONS
from aerie.supervisor.gpus import Device, Seen
from aerie.supervisor.tree import Survivor

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Four GPUs on which nothing is dead, and a record of what was done with them."""

    class Machine:
        used = (GIB, GIB, GIB, GIB)
        dead = ()
        hangs = False
        survivors = ()
        nodes = (-1, -1, -1, -1)
        faults: dict[int, Seen] = {}  # noqa: RUF012 - replaced, never changed
        reduced: list[dict[str, str]] = []  # noqa: RUF012 - made anew for each test

        @property
        def tried(self):
            pairs = [
                Pair(*numbers, Moved.HUNG if numbers in self.dead else Moved.WORKS, "copy 4 KiB", 50.0)
                for numbers in in_rounds(len(self.used))
            ]
            return Tried(pairs, survivors=list(self.survivors))

    machine = Machine()
    machine.reduced = []

    def all_reduce(backend, ranks, environment, _deadline, _say):
        machine.reduced.append(environment)
        hangs = machine.hangs and "NCCL_P2P_DISABLE" not in environment
        seconds = {} if hangs else dict.fromkeys(REDUCTIONS, 0.01)
        return Reduction(backend, ranks, State.HUNG if hangs else State.WORKS, "rank 1" if hangs else "", seconds)

    device = Device("RTX PRO 6000", (12, 0), 96 * GIB, 24064)
    monkeypatch.setattr(
        command.gpus,
        "seen",
        lambda: tuple(machine.faults.get(n, Seen(str(n), str(n), device, "")) for n in range(len(machine.used))),
    )
    monkeypatch.setattr(command, "node_of", lambda address: machine.nodes[int(address)])
    monkeypatch.setattr(command.gpus, "used_bytes", lambda: machine.used)
    monkeypatch.setattr(command, "try_pairs", lambda *_: machine.tried)
    monkeypatch.setattr(command, "all_reduce", all_reduce)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return machine


def run(*arguments):
    return cli.main(["fabric", *arguments])


def test_what_works_is_not_tried_without_peer_traffic_unless_that_is_asked_for(machine, capsys):
    assert run() == 0
    assert len(machine.reduced) == 1
    assert run("--compare") == 0
    assert [environment.get("NCCL_P2P_DISABLE") for environment in machine.reduced] == [None, None, "1"]
    assert "works: bytes arrive between all 12 pairs of 4 GPUs" in capsys.readouterr().out


@pytest.mark.parametrize(("dead", "hangs"), [([(0, 1)], False), ([], True)])
def test_what_is_dead_is_tried_without_peer_traffic(machine, capsys, dead, hangs):
    machine.dead, machine.hangs = dead, hangs
    assert run() == 1
    assert [environment.get("NCCL_P2P_DISABLE") for environment in machine.reduced] == [None, "1"]
    assert "DEAD: peer traffic is dead" in capsys.readouterr().out


def test_where_pairs_between_nodes_are_dead_peer_traffic_within_them_is_proven(machine, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    machine.dead, machine.nodes = [(0, 2)], (0, 0, 1, 1)
    assert run("--compare") == 1
    assert [(env["NCCL_P2P_LEVEL"], env.get("NCCL_P2P_DISABLE")) for env in machine.reduced] == [
        ("PHB", None),
        ("PHB", "1"),
    ]
    assert "LIMITED: peer traffic works within each NUMA node and not between them: 1 of 12" in capsys.readouterr().out


def test_a_level_that_is_lower_stays(machine, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_LEVEL", "PXB")
    machine.dead, machine.nodes = [(0, 2)], (0, 0, 1, 1)
    run()
    assert machine.reduced[0]["NCCL_P2P_LEVEL"] == "PXB"


def test_an_engine_s_fallback_is_no_part_of_the_proof(machine, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("NCCL_P2P_LEVEL", "SYS")
    assert run("--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["environment"] == {"NCCL_P2P_LEVEL": "SYS"}
    assert "NCCL_P2P_DISABLE" not in machine.reduced[0]
    assert machine.reduced[0]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("used", "why"),
    [
        ((), "no GPU is to be seen here"),
        ((GIB,), "one GPU is to be seen here"),
        ((GIB, 80 * GIB), "GPU 1 has 80.0 GiB in use"),
    ],
)
def test_nothing_is_tried_where_there_is_no_pair_or_somebody_is_at_work(machine, capsys, used, why):
    machine.used = used
    assert run() == 3
    assert machine.reduced == []
    assert f"unproven: {why}" in capsys.readouterr().out


def test_a_gpu_that_cannot_be_asked_is_named_and_the_report_still_comes(machine, capsys):
    machine.faults = {1: Seen("1", "1", None, "Not Supported"), 3: Seen("GPU-5f0c", "", None, "Not Found")}
    assert run("--json", "-") == 3
    out, err = capsys.readouterr()
    assert machine.reduced == []
    why = "GPU 1 (1) cannot be asked: NVML says Not Supported; "
    why += "GPU GPU-5f0c (address unknown) cannot be asked: NVML says Not Found. "
    assert f"unproven: {why}" in err
    report = json.loads(out)
    assert report["why"].startswith(why)
    assert [(gpu["number"], gpu["name"], gpu["address"]) for gpu in report["gpus"]] == [
        (0, "RTX PRO 6000", "0"),
        (1, "unknown", "1"),
        (2, "RTX PRO 6000", "2"),
        (3, "unknown", ""),
    ]


def test_nothing_more_is_tried_beside_a_process_that_cannot_be_ended(machine, capsys):
    machine.dead, machine.survivors = [(0, 1)], [Survivor(7, "python", "D", "uvm_lock")]
    assert run() == 1
    assert machine.reduced == []
    assert "restart the host" in capsys.readouterr().out


def test_the_report_is_written_where_it_was_asked_for(machine, tmp_path, capsys):
    assert run("--json", str(tmp_path / "report.json")) == 0
    assert json.loads((tmp_path / "report.json").read_text())["peer_to_peer"] == "works"
    assert run("--json", str(tmp_path / "nowhere/report.json")) == 2
    assert "--json " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "3"], "--ranks counts the processes of --backend gloo"),
        (["--backend", "mpi"], "invalid choice: 'mpi'"),
        (["--deadline", "0"], "'0' is no number of seconds above 0"),
        (["--deadline", "nan"], "'nan' is no number of seconds above 0"),
        (["--backend", "gloo", "--ranks", "0"], "'0' is no number above 0"),
        (["topology"], "invalid choice: 'topology'"),
    ],
)
def test_a_usage_error_exits_2_and_names_what_was_given(arguments, message, capsys):
    try:
        code = run(*arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_nothing(aerie, tmp_path, environment, gone, number, code):
    (tmp_path / "torch.py").write_text(
        f"import os, time\nopen({str(tmp_path)!r} + '/rank' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    path = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    process = aerie("fabric", "--backend", "gloo", "--ranks", "2", PYTHONPATH=path, TMPDIR=str(tmp_path))
    files = [tmp_path / "rank0", tmp_path / "rank1"]
    for _ in range(400):
        if all(file.exists() and file.read_text() for file in files):
            break
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(20) == code
    assert all(gone(int(file.read_text())) for file in files)
    assert [file.name for file in Path(tmp_path).glob("aerie-fabric-*")] == []


def test_without_torch_it_says_so(aerie):
    process = aerie("fabric", "--backend", "gloo")
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert re.search(r"FAILED: rank [01], .*: it ended with 1: ModuleNotFoundError: No module named 'torch'", said)
