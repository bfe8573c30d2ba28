"""The script that follows the kernel's journal, with a stand-in for `journalctl`; the real one runs in Molecule."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from aerie_host import nvidia

from aerie.diagnosis.evidence import Kind, parse_kernel

REPOSITORY = Path(__file__).parents[3]
SCRIPT = REPOSITORY / "ansible/roles/vllm/files/kernel-log.sh"
SIGNATURES = yaml.safe_load((REPOSITORY / "src/aerie/diagnosis/signatures.yaml").read_text())
PREFIX = "2026-11-29T22:20:00.000001+0000 kernel: "
NOT_IN_A_SIGNATURE = [
    "VLLM::Worker_TP[77]: segfault at 10 ip 00007f0000000000 sp 00007ffc00000000 error 4 in libcuda.so.1[7f00+1]",
    "traps: VLLM::Worker_TP[77] general protection fault ip:7f0000000000 sp:7ffc00000000 error:0",
    "VLLM::EngineCor invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0",
    "pcieport 0000:40:01.1: DPC: containment event, status:0x1f01 source:0x0000",
    "pcieport 0000:40:01.1: pciehp: Slot(1): Link Down",
]


def followed(directory: Path, lines: list[str]) -> str:
    """What the script keeps of a journal of these lines."""
    (directory / "bin").mkdir()
    (directory / "journal").write_text("".join(f"{line}\n" for line in lines))
    journalctl = directory / "bin" / "journalctl"
    journalctl.write_text(f'#!/bin/sh\nexec cat "{directory}/journal"\n')
    journalctl.chmod(0o755)
    path = f"{directory}/bin:{os.environ['PATH']}"
    ended = subprocess.run(["sh", SCRIPT, directory], env={"PATH": path}, capture_output=True, text=True, check=False)
    # It follows for ever; an end of the journal is one that systemd has to mend.
    assert (ended.returncode, ended.stderr) == (1, "")
    return (directory / "kernel.log").read_text()


def kernel_lines() -> list[str]:
    """Every line that the diagnosis can read, from the signatures and beside them."""
    excerpts = [line for each in SIGNATURES if each["where"] == "evidence" for line in each["excerpt"].splitlines()]
    lines = [line if line.startswith("2026-") else PREFIX + line for line in [*excerpts, *NOT_IN_A_SIGNATURE]]
    return [line for line in lines if parse_kernel(line)]


def test_what_the_diagnosis_can_read_is_kept_and_nothing_else(tmp_path: Path) -> None:
    lines = kernel_lines()
    assert len(lines) > len(NOT_IN_A_SIGNATURE) + 5
    noise = [f"{PREFIX}usb 1-1: new high-speed USB device number 2", f"{PREFIX}IPv6: ADDRCONF(NETDEV_CHANGE): eth0"]
    assert followed(tmp_path, [noise[0], *lines, noise[1]]).splitlines() == lines


def test_a_long_log_is_cut_and_its_older_half_kept(tmp_path: Path) -> None:
    line = f"{PREFIX}pcieport 0000:40:01.1: AER: Corrected error message received from 0000:40:01.1"
    last = f"{PREFIX}NVRM: Xid (PCI:0000:41:00): 79, pid=9, GPU has fallen off the bus."
    assert followed(tmp_path, [line] * 12_000 + [last]).endswith(f"{last}\n")
    sizes = [(tmp_path / name).stat().st_size for name in ("kernel.log", "kernel.log.1")]
    assert 0 < max(sizes) <= 500_000 + 2 * len(line)
    assert sum(sizes) >= 500_000


def test_the_line_that_molecule_leaves_in_the_machines_own_log_is_no_lost_gpu_to_host_check() -> None:
    verify = (REPOSITORY / "ansible/roles/vllm/molecule/default/verify.yml").read_text()
    lines = [PREFIX.partition("kernel:")[0] + line for line in re.findall(r"echo '(kernel: .*)' >/dev/kmsg", verify)]
    assert len(lines) == 2
    assert nvidia.parse_kernel(lines) == ()
    (evidence,) = parse_kernel("\n".join(lines))
    assert (evidence.kind, evidence.pci) == (Kind.HARDWARE, "0000:41:00")


@pytest.mark.parametrize("unwanted", ["kernel.log", "kernel.log.1"])
def test_it_begins_anew(tmp_path: Path, unwanted: str) -> None:
    (tmp_path / unwanted).write_text(f"{PREFIX}NVRM: of an earlier run\n")
    followed(tmp_path, [])
    assert not [path for path in tmp_path.glob("kernel.log*") if path.stat().st_size]
