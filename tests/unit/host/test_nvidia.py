"""The driver's words: its version, its GPUs, its matrix, and its lines in the kernel's log."""

from __future__ import annotations

from pathlib import Path

import pytest
from aerie_host import nvidia
from aerie_host.nvidia import Driver, KernelEvent

OPEN = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build  (builder@host)  Mon Jun  2 13:13:04
GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)
"""
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.195.03  Sat Sep 20 00:25:47 UTC 2025\n"


@pytest.mark.parametrize(
    ("text", "driver"),
    [
        (OPEN, Driver("595.71.05", open=True)),
        (PROPRIETARY, Driver("570.195.03", open=False)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  610.57  Release Build", Driver("610.57", open=True)),
        ("", None),
        ("something else", None),
    ],
)
def test_version(text: str, driver: Driver | None) -> None:
    assert nvidia.parse_version(text) == driver


def test_branch_is_the_first_number() -> None:
    assert Driver("580.105.08", open=True).branch == "580"


def test_information_of_a_gpu() -> None:
    text = (
        "Model: \t\t NVIDIA RTX PRO 6000 Blackwell Server Edition\nBus Location: \t 0000:c1:00.0\nDevice Minor: \t 6\n"
    )
    gpu = nvidia.parse_information(text)
    assert gpu is not None
    assert (gpu.address, gpu.name, gpu.minor) == ("0000:c1:00.0", "NVIDIA RTX PRO 6000 Blackwell Server Edition", 6)
    assert nvidia.parse_information("") is None


SMI = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<driver_version>575.51.02</driver_version>
\t<attached_gpus>1</attached_gpus>
\t<gpu id="00000000:C1:00.0">
\t\t<product_name>NVIDIA Example</product_name>
\t\t<persistence_mode>Disabled</persistence_mode>
\t\t<minor_number>3</minor_number>
\t\t<pci>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>4</max_link_gen>
\t\t\t\t\t<current_link_gen>2</current_link_gen>
\t\t\t\t\t<max_device_link_gen>4</max_device_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>8x</max_link_width>
\t\t\t\t\t<current_link_width>8x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<performance_state>P5</performance_state>
\t\t<clocks_throttle_reasons>
\t\t\t<clocks_throttle_reason_gpu_idle>Not Active</clocks_throttle_reason_gpu_idle>
\t\t</clocks_throttle_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>97887 MiB</total>
\t\t</fb_memory_usage>
\t\t<bar1_memory_usage>
\t\t\t<total>N/A</total>
\t\t</bar1_memory_usage>
\t\t<utilization>
\t\t\t<gpu_util>25 %</gpu_util>
\t\t</utilization>
\t</gpu>
</nvidia_smi_log>
"""


def test_smi() -> None:
    smi = nvidia.parse_smi(SMI)
    (gpu,) = smi.gpus
    assert (smi.driver, smi.problem, gpu.address, gpu.minor, gpu.persistence) == (
        "575.51.02",
        "",
        "0000:c1:00.0",
        3,
        False,
    )
    assert (gpu.vram_mib, gpu.bar1_mib, gpu.idle, gpu.utilization) == (97887, None, False, 25)
    assert (gpu.max_generation, gpu.generation, gpu.max_width, gpu.width) == (4, 2, 8, 8)


def test_what_an_h200_says() -> None:
    """A whole answer of driver 580.159.04, but for what names the one card."""
    smi = nvidia.parse_smi((Path(__file__).parent / "smi/h200.xml").read_text())
    (gpu,) = smi.gpus
    assert (smi.driver, gpu.address, gpu.name, gpu.minor) == ("580.159.04", "0000:00:06.0", "NVIDIA H200", 0)
    assert (gpu.vram_mib, gpu.bar1_mib, gpu.idle, gpu.persistence) == (143771, 262144, True, True)
    assert (gpu.max_generation, gpu.generation, gpu.max_width, gpu.width) == (5, 5, 16, 16)


def test_smi_that_complains_before_it_answers() -> None:
    smi = nvidia.parse_smi("WARNING: infoROM is corrupted at gpu 0000:41:00.0\n" + SMI)
    assert (smi.problem, len(smi.gpus)) == ("WARNING: infoROM is corrupted at gpu 0000:41:00.0", 1)


@pytest.mark.parametrize(
    "text",
    [
        "Unable to determine the device handle for GPU0000:07:00.0: Unknown Error\n",
        "Unable to determine the device handle for GPU 0000:03:00.0: GPU is lost.  Reboot the system to recover it\n",
        "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 595.71\n",
    ],
)
def test_smi_that_cannot_answer_is_quoted(text: str) -> None:
    assert nvidia.parse_smi(text) == nvidia.Smi("", (), " ".join(text.split()))


def test_smi_cut_short() -> None:
    smi = nvidia.parse_smi(SMI[:600])
    assert smi.gpus == ()
    assert smi.problem.startswith("not the XML of nvidia-smi: ")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:03:00.0", "0000:03:00.0"),
        ("0000:03:00", "0000:03:00.0"),
        ("03:00", "0000:03:00.0"),
        ("00000001:C1:00.0", "0001:c1:00.0"),
    ],
)
def test_addresses_are_written_as_sysfs_does(text: str, address: str) -> None:
    assert nvidia.address(text) == address


def test_topology_with_escapes_and_other_columns() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
        "GPU0\t X \tPIX\tSYS\tNODE\t0-63,128-191\t0\t\tN/A\n"
        "GPU1\tPIX\t X \tSYS\tNODE\t0-63,128-191\t0\t\tN/A\n"
        "GPU2\tSYS\tSYS\t X \tSYS\t64-127,192-255\t1\t\tN/A\n"
        "NIC0\tNODE\tNODE\tSYS\t X \t\t\t\t\n\nLegend:\n\n  X    = Self\n"
    )
    relations = nvidia.parse_topology(text)
    assert relations == {(0, 1): "PIX", (0, 2): "SYS", (1, 0): "PIX", (1, 2): "SYS", (2, 0): "SYS", (2, 1): "SYS"}
    assert nvidia.parse_topology("Failed to initialize NVML") == {}


AT = "2026-11-02T09:41:17.004251+00:00"


@pytest.mark.parametrize(
    ("lines", "event"),
    [
        (
            f"{AT} kernel: NVRM: Xid (PCI:0000:01:00): 79, pid=6755, name=python, GPU has fallen off the bus.",
            KernelEvent(AT, "0000:01:00.0", "pid=6755, name=python, GPU has fallen off the bus.", 79),
        ),
        # Older drivers, and dmesg's own clock.
        (
            "[ 269.517] NVRM: Xid (0000:01:00): 62, 0096(1c54) 00000000",
            KernelEvent("", "0000:01:00.0", "0096(1c54) 00000000", 62),
        ),
        (
            f"{AT} kernel: NVRM: GPU 0000:01:00.0: GPU has fallen off the bus.",
            KernelEvent(AT, "0000:01:00.0", "GPU has fallen off the bus."),
        ),
        (
            "NVRM: GPU at 0000:01:00.0 has fallen off the bus.",
            KernelEvent("", "0000:01:00.0", "has fallen off the bus."),
        ),
        (
            f"{AT} kernel: NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x22:0x56:897)",
            KernelEvent(AT, "0000:c1:00.0", "RmInitAdapter failed! (0x22:0x56:897)"),
        ),
        (
            (
                f"{AT} kernel: NVRM: The NVIDIA GPU 0000:b3:00.0\n"
                f"{AT} kernel: NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
                f"{AT} kernel: NVRM: fallen off the bus and is not responding to commands."
            ),
            KernelEvent(AT, "0000:b3:00.0", "fallen off the bus and is not responding to commands"),
        ),
        (
            "NVRM: This PCI I/O region is invalid:\nNVRM: BAR1 is 0M @ 0x0 (PCI:0000:01:00.0)",
            KernelEvent("", "0000:01:00.0", "BAR1 is 0M @ 0x0"),
        ),
        (
            f"{AT} kernel: pcieport 0000:40:01.1: pciehp: Slot(5): Link Down",
            KernelEvent(AT, "0000:40:01.1", "pciehp: Slot(5): Link Down"),
        ),
    ],
)
def test_a_line_of_the_kernel(lines: str, event: KernelEvent) -> None:
    assert nvidia.parse_kernel(lines.splitlines()) == (event,)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU at PCI:0000:01:00: GPU-b30686fb-50e5-b296-a563-b7746cd0b24a",
        "NVRM: GPU 0000:01:00.0: GPU serial number is 0.",
        "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  595.71.05",
        "usb 1-1: new high-speed USB device",
    ],
)
def test_a_line_that_is_no_bad_news(line: str) -> None:
    assert nvidia.parse_kernel([line]) == ()


def test_a_message_whose_end_was_lost_tells_nothing_of_the_next_gpu() -> None:
    lines = [
        "NVRM: The NVIDIA GPU 0000:b3:00.0",
        "other",
        "another",
        "NVRM: fallen off the bus and is not responding to commands.",
    ]
    assert nvidia.parse_kernel(lines) == ()


@pytest.mark.parametrize(
    ("xid", "text", "lost"),
    [(79, "GPU has fallen off the bus.", True), (31, "MMU Fault", False), (None, "RmInitAdapter failed! (0x26)", True)],
)
def test_what_means_that_a_gpu_is_lost(xid: int | None, text: str, lost: bool) -> None:  # noqa: FBT001
    assert KernelEvent("", "0000:01:00.0", text, xid).lost is lost
