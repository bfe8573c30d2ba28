"""ACS on the stub machines: which ports are written, that nothing else of a space changes, and the way back."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from aerie_host import acs
from aerie_host.pci import read_devices

sys.path.insert(0, str(Path(__file__).parents[3] / "ansible/molecule/stub_gpu_host"))
from build import build

ROOT_PORT = "0000:00:01.1"
SWITCH = [f"0000:02:0{number}.0" for number in range(8)]


@pytest.fixture
def one_switch(tmp_path: Path) -> Path:
    build("eight-one-switch", tmp_path / "machine")
    return tmp_path / "machine/sys"


def spaces(sys_dir: Path) -> dict[str, bytes]:
    return {entry.name: (entry / "config").read_bytes() for entry in (sys_dir / "bus/pci/devices").iterdir()}


def run(sys_dir: Path, *arguments: str) -> int:
    return acs.main([*arguments, "--sys", str(sys_dir), "--state", str(sys_dir.parent / "acs.json")])


def test_root_port_and_every_downstream_port_are_found(one_switch: Path) -> None:
    assert [port.address for port in acs.redirecting(read_devices(one_switch))] == [ROOT_PORT, *SWITCH]


def test_apply_changes_the_control_word_and_nothing_else(one_switch: Path) -> None:
    before = spaces(one_switch)
    assert run(one_switch, "apply") == 0
    after = spaces(one_switch)
    changed = [address for address in sorted(before) if before[address] != after[address]]
    assert changed == [ROOT_PORT, *SWITCH]
    devices = read_devices(one_switch)
    for address in changed:
        place = devices[address].acs.offset + 6
        assert int.from_bytes(before[address][place : place + 2], "little") == 0x001D
        assert int.from_bytes(after[address][place : place + 2], "little") == 0x0001  # source validation stays
        assert (
            before[address][:place] + before[address][place + 2 :]
            == after[address][:place] + after[address][place + 2 :]
        )


def test_check_names_the_ports_and_passes_after_apply(one_switch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(one_switch, "check") == 1
    assert f"{ROOT_PORT} (root port: ReqRedir, CmpltRedir, UpstreamFwd)" in capsys.readouterr().out
    assert run(one_switch, "apply") == 0
    assert run(one_switch, "check") == 0
    assert "peer traffic of 8 GPUs takes the short way" in capsys.readouterr().out


def test_undo_gives_back_the_same_bytes(one_switch: Path) -> None:
    before = spaces(one_switch)
    run(one_switch, "apply")
    assert run(one_switch, "undo") == 0
    assert spaces(one_switch) == before
    assert not (one_switch.parent / "acs.json").exists()
    assert run(one_switch, "undo") == 0  # once more: nothing is recorded, nothing to do


def test_a_later_apply_does_not_forget_what_the_firmware_had(one_switch: Path) -> None:
    before = spaces(one_switch)
    run(one_switch, "apply")
    first = (one_switch.parent / "acs.json").read_text()
    run(one_switch, "apply")
    assert (one_switch.parent / "acs.json").read_text() == first
    run(one_switch, "undo")
    assert spaces(one_switch) == before


def test_undo_leaves_bits_alone_that_somebody_else_changed(one_switch: Path) -> None:
    run(one_switch, "apply")
    port = read_devices(one_switch)[ROOT_PORT]
    with (one_switch / "bus/pci/devices" / ROOT_PORT / "config").open("r+b") as config:
        config.seek(port.acs.offset + 6)
        config.write(b"\x03\x00")  # translation blocking on, too
    run(one_switch, "undo")
    assert read_devices(one_switch)[ROOT_PORT].acs.control == 0x001F


def test_undo_leaves_a_port_alone_that_is_another_device_now(
    one_switch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(one_switch, "apply")
    state = one_switch.parent / "acs.json"
    recorded = json.loads(state.read_text())
    recorded[ROOT_PORT]["device"] = 0x1234
    recorded["0000:7f:00.0"] = recorded[ROOT_PORT]
    state.write_text(json.dumps(recorded))
    assert run(one_switch, "undo") == 0
    assert read_devices(one_switch)[ROOT_PORT].acs.control == 0x0001
    said = capsys.readouterr().out
    assert f"left alone {ROOT_PORT}" in said
    assert "left alone 0000:7f:00.0" in said


def test_a_machine_whose_acs_is_off_is_not_written(tmp_path: Path) -> None:
    build("eight-two-sockets", tmp_path / "machine")
    sys_dir = tmp_path / "machine/sys"
    before = spaces(sys_dir)
    assert run(sys_dir, "apply") == 0
    assert spaces(sys_dir) == before
    assert not (tmp_path / "machine/acs.json").exists()


def test_no_pci_bus_is_no_failure(tmp_path: Path) -> None:
    assert run(tmp_path / "sys", "apply") == 0
    assert run(tmp_path / "sys", "check") == 0


def test_gpus_that_come_late_are_waited_for(one_switch: Path) -> None:
    late = one_switch / "bus/pci/devices/0000:0a:00.0"
    target = late.readlink()
    late.unlink()
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            late.symlink_to(target)

    assert acs.wait_for_gpus(one_switch, 8, 60, clock=lambda: float(len(slept)), sleep=sleep) == 8
    assert len(slept) == 3


def test_a_gpu_that_never_comes_keeps_nobody_waiting_for_ever(one_switch: Path) -> None:
    slept = []
    assert acs.wait_for_gpus(one_switch, 9, 5, clock=lambda: float(len(slept)), sleep=slept.append) == 8
    assert len(slept) == 5


def test_the_others_ports_are_cleared_where_a_gpu_is_missing(
    one_switch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(one_switch, "apply", "--gpus", "9", "--wait", "0") == 0
    assert "8 of 9 GPUs are on the bus" in capsys.readouterr().err
    assert run(one_switch, "check") == 0


def test_a_port_that_does_not_take_it_is_named(
    one_switch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 2)
    assert run(one_switch, "apply") == 2
    assert f"reads back with redirection on: {ROOT_PORT}" in capsys.readouterr().err


def test_a_locked_down_kernel_is_told_as_such(
    one_switch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one_switch / "kernel/security").mkdir(parents=True)
    (one_switch / "kernel/security/lockdown").write_text("none [integrity] confidentiality\n")

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pwrite", refuse)
    assert run(one_switch, "apply") == 2
    said = capsys.readouterr().err
    assert "locked down (none [integrity] confidentiality)" in said
    assert "pci=disable_acs_redir=" in said
    assert "Traceback" not in said


def test_somebody_who_may_read_the_header_alone_is_sent_to_root(
    one_switch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in [ROOT_PORT, *SWITCH]:
        config = one_switch / "bus/pci/devices" / address / "config"
        config.write_bytes(config.read_bytes()[:64])
    assert run(one_switch, "check") == 2
    assert "only root can read the capabilities of 0000:00:01.1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"0000:00:01.1": 29}', '{"0000:00:01.1": {"vendor": 1}}'])
def test_a_broken_record_is_named_and_keeps_no_port_redirecting(
    one_switch: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    before = spaces(one_switch)
    state = one_switch.parent / "acs.json"
    state.write_text(text)
    assert run(one_switch, "undo") == 2
    assert "acs.json is no record of ports" in capsys.readouterr().err
    assert run(one_switch, "apply") == 0
    assert "acs.json is no record of ports" in capsys.readouterr().err
    assert acs.redirecting(read_devices(one_switch)) == []
    assert run(one_switch, "undo") == 0
    assert spaces(one_switch) == before
