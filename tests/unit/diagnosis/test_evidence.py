"""What the kernel and the cgroup say, and when it explains an engine's end."""

# ruff: noqa: E501 - the kernel's lines are as long as they are

import pytest

from aerie.diagnosis import Collector, Evidence, Kind, parse_kernel, pci_address, relevant
from aerie.diagnosis.evidence import parse_bare
from aerie.startup.lines import parse

AT = "2026-11-29T13:34:58,123456+00:00 host1 kernel: "
OFF_THE_BUS = AT + "NVRM: Xid (PCI:0000:41:00): 79, pid=4242, name=VLLM::Worker_TP, GPU has fallen off the bus."
OOM = (
    AT
    + "Memory cgroup out of memory: Killed process 4242 (VLLM::Worker_TP) total-vm:91234567kB, anon-rss:88123456kB, file-rss:0kB"
)
DPC = AT + "pcieport 0000:40:01.1: DPC: containment event, status:0x1f01"
AER = AT + "pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received from 0000:41:00.0"
COUNTED = Evidence("cgroup", None, "oom_kill: the kernel killed 1 of the container's processes", kind=Kind.MEMORY)
GONE = "(EngineCore pid=7) ERROR 11-29 13:35:01 [multiproc_executor.py:315] Worker proc VllmWorker-3 died unexpectedly (exit code: -9), shutting down executor.\n"
ATTRIBUTE = "(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1] AttributeError: no such attribute\n"
CUDA = "(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1] torch.AcceleratorError: CUDA error: unspecified launch failure\n"


def only(text):
    (found,) = parse_kernel(text)
    return found


@pytest.mark.parametrize("before", ["[Sun Nov 29 13:34:58 2026] ", "[ 1234.567890] ", "kernel: ", ""])
def test_a_line_without_a_host_is_the_kernels_by_its_words(before):
    (found,) = parse_bare(before + OOM.removeprefix(AT))
    assert (found.pid, found.kind) == (4242, Kind.MEMORY)
    assert found.text == OOM.removeprefix(AT)
    assert not parse_bare("a process: " + OOM.removeprefix(AT))
    assert not parse_bare(before + "nothing of the kernel's")


def diagnosed(log, evidence, signatures=(), **known):
    collector = Collector(signatures)
    collector.feed(parse(log))
    return collector.diagnose("vllm serve ended with exit code 1", evidence, **known)


def test_an_xid_has_its_time_its_gpu_its_process_and_its_meaning():
    found = only(OFF_THE_BUS)
    assert (found.source, found.pci, found.pid, found.kind) == ("kernel", "0000:41:00", 4242, Kind.HARDWARE)
    assert found.at == pytest.approx(1795959298.123456)
    assert "fell off the bus" in found.meaning
    assert found.text.startswith("NVRM: Xid (PCI:0000:41:00): 79, ")


@pytest.mark.parametrize("number", [48, 62, 64, 74, 79, 92, 94, 95, 109, 119, 120, 143])
def test_what_the_device_the_bus_or_the_driver_did_is_hardware(number):
    assert only(f"NVRM: Xid (PCI:0000:41:00): {number}, x").kind is Kind.HARDWARE


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 9999])
def test_what_a_program_can_do_as_well_explains_nothing_by_itself(number):
    found = only(f"NVRM: Xid (PCI:0000:41:00): {number}, pid='<unknown>', name=<unknown>, x")
    assert found.kind is None
    assert found.pid is None
    assert found.meaning


@pytest.mark.parametrize(
    ("line", "kind", "pci"),
    [
        ("NVRM: GPU 0000:c1:00.0: GPU has fallen off the bus.", Kind.HARDWARE, "0000:c1:00"),
        (
            "nvidia 0000:41:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer",
            Kind.HARDWARE,
            "0000:41:00",
        ),
        ("pcieport 0000:40:01.1: AER: Corrected error received: 0000:41:00.0", None, "0000:40:01"),
        (
            "pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received from 0000:41:00.0",
            Kind.HARDWARE,
            "0000:40:01",
        ),
        ("pcieport 0000:40:01.1: pciehp: Slot(4): Link Down", Kind.HARDWARE, "0000:40:01"),
        ("pcieport 0000:40:01.1: DPC: containment event, status:0x1f01", Kind.HARDWARE, "0000:40:01"),
        ("nvidia 0000:41:00.0:    [ 5] SDES                   (First)", Kind.HARDWARE, "0000:41:00"),
        ("Surprise Link Down on 0000:41:00.0", Kind.HARDWARE, "0000:41:00"),
        ("NVRM: API mismatch: the client has the version 595.71.05, but", Kind.HARDWARE, None),
        ("VLLM::Worker_TP[4242]: segfault at 0 ip 00007f sp 00007f error 4 in libnccl.so.2", Kind.CRASH, None),
        ("traps: python3[4242] general protection fault ip:7f sp:7f error:0", Kind.CRASH, None),
    ],
)
def test_other_lines_of_the_kernel(line, kind, pci):
    assert (only(AT + line).kind, only(AT + line).pci) == (kind, pci)


@pytest.mark.parametrize(
    "line",
    [
        OOM,
        "[ 1234.567890] Out of memory: Killed process 4242 (python3) total-vm:1kB",
        "Nov 29 13:34:58 host1 kernel: oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/docker/a,task_memcg=/docker/a,task=VLLM::Worker_TP,pid=4242,uid=0",
    ],
)
def test_a_kill_for_lack_of_memory_names_its_process(line):
    assert (only(line).kind, only(line).pid) == (Kind.MEMORY, 4242)


def test_a_kill_of_another_program_explains_nothing():
    assert only("Out of memory: Killed process 7 (chrome) total-vm:1kB").kind is None


@pytest.mark.parametrize(
    "line", ["", "usb 1-1: new device", "2026-99-29T13:34:58+00:00 host1 kernel: x", "\x00\xff", "[", "NVRM: Xid ("]
)
def test_what_says_nothing_is_left_out(line):
    assert parse_kernel(line) == []


def test_a_time_that_is_none_is_unknown():
    assert only("2026-99-29T13:34:58+00:00 host1 kernel: NVRM: Xid (PCI:0000:41:00): 79, x").at is None


@pytest.mark.parametrize("text", ["0000:41:00", "0000:41:00.0", "00000000:41:00.0", "41:00.0", "0000:41:00.0 "])
def test_a_pci_address_is_one_however_it_is_written(text):
    assert pci_address(text) == "0000:41:00"


def test_only_what_is_near_in_time_belongs_to_an_end():
    found = parse_kernel(
        "\n".join([OFF_THE_BUS, OFF_THE_BUS.replace("13:34", "09:34"), OFF_THE_BUS.replace("13:34", "13:59")])
    )
    end = found[0].at + 30
    assert relevant(found, end) == [found[0]]


def test_what_has_no_time_is_kept():
    found = parse_kernel("NVRM: Xid (PCI:0000:41:00): 79, x")
    assert relevant(found, 5.0) == found


def test_only_the_engines_own_gpus_count_where_they_are_known():
    found = parse_kernel(OFF_THE_BUS)
    end = found[0].at
    assert relevant(found, end, ["00000000:41:00.0"]) == found
    assert relevant(found, end, ["0000:c1:00.0"]) == []


def test_an_error_of_the_bus_counts_for_the_engines_gpus_and_the_ports_above_them():
    for line, device in ((DPC, "0000:40:01.1"), (AER, "0000:40:01.1"), (AER, "00000000:41:00.0")):
        found = parse_kernel(line)
        end = found[0].at
        assert relevant(found, end, [device]) == found
        assert relevant(found, end, ["0000:c1:00.0", "0000:40:01.2"]) == []
        assert relevant(found, end) == found, "not known"
    mismatch = parse_kernel(AT + "NVRM: API mismatch: the client has the version 595.71.05, but")
    assert relevant(mismatch, end, ["0000:41:00.0"]) == mismatch, "of no device"


def test_a_kill_for_memory_from_before_the_engines_start_explains_nothing():
    found = parse_kernel(OOM + "\n" + OFF_THE_BUS)
    end = found[0].at + 60
    assert relevant(found, end, since=end - 90) == found
    assert relevant(found, end, since=end - 30) == [found[1]], "a GPU stays lost"
    timeless = parse_kernel("Out of memory: Killed process 4242 (python3) total-vm:1kB")
    assert relevant(timeless, end, since=end) == timeless


def test_a_worker_killed_without_words_and_a_kill_for_memory_are_one_story():
    found = diagnosed(GONE, parse_kernel(OOM))
    assert found.kind is Kind.MEMORY
    assert "Killed process 4242" in found.evidence[0]
    assert diagnosed(GONE, [COUNTED]).kind is Kind.MEMORY
    assert diagnosed("", [COUNTED]).kind is Kind.MEMORY


def test_a_lost_gpu_explains_an_error_of_cuda_and_a_silent_end():
    for log in (CUDA, GONE, ""):
        assert diagnosed(log, parse_kernel(OFF_THE_BUS)).kind is Kind.HARDWARE


def test_an_exception_that_explains_itself_is_not_overruled():
    found = diagnosed(ATTRIBUTE, parse_kernel(OFF_THE_BUS + "\n" + OOM))
    assert found.kind is Kind.CRASH
    assert len(found.evidence) == 2


def test_a_kill_for_memory_does_not_explain_an_error_of_cuda():
    assert diagnosed(CUDA, parse_kernel(OOM)).kind is Kind.CRASH


def test_an_illegal_access_with_its_xid_stays_a_crash():
    found = diagnosed(CUDA, parse_kernel(AT + "NVRM: Xid (PCI:0000:41:00): 31, pid=4242, name=x, MMU Fault"))
    assert found.kind is Kind.CRASH
    assert "Xid 31" in found.evidence[0]


def test_a_hang_is_told_as_one_unless_the_hardware_explains_it():
    assert diagnosed("", [], kind=Kind.HUNG).kind is Kind.HUNG
    assert diagnosed("", parse_kernel(OFF_THE_BUS), kind=Kind.HUNG).kind is Kind.HARDWARE


FULL = "(EngineCore pid=7) ERROR 11-29 13:35:01 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.72 GiB of which 1.00 GiB is free.\n"
STOPPED = Evidence(
    "supervisor",
    None,
    "the engine hangs: no step for 61 s, 1 request waits; VLLM::Worker_TP1 (pid 9) is stopped (state T) since 13:34:00 UTC",
    kind=Kind.HUNG,
)


@pytest.mark.parametrize("outside", [DPC, AER, OFF_THE_BUS])
def test_what_the_bus_reports_is_not_why_memory_ran_out_or_a_process_is_stopped(outside):
    found = diagnosed(FULL, parse_kernel(outside), None)
    assert found.kind is Kind.MEMORY
    assert found.known
    assert len(found.evidence) == 1
    assert (
        diagnosed(FULL.replace("torch.OutOfMemoryError: CUDA", "RuntimeError: CUDA error:"), parse_kernel(outside)).kind
        is Kind.CRASH
    )
    stopped = diagnosed("", [*parse_kernel(outside), STOPPED], None, kind=Kind.HUNG)
    assert (stopped.signature, stopped.kind) == ("engine-hangs-process-stopped", Kind.HUNG)
    assert diagnosed(CUDA, parse_kernel(outside), None).kind is Kind.HARDWARE
    assert diagnosed("", parse_kernel(outside), None, kind=Kind.HUNG).kind is Kind.HARDWARE


def test_an_error_of_another_device_does_not_explain_a_worker_that_was_killed():
    found = parse_kernel(AER.replace("0000:41:00.0", "0000:42:00.0") + "\n" + DPC)
    seen = relevant(found, found[0].at, ["0000:c1:00.0"])
    assert diagnosed(GONE, seen, None, kind=Kind.KILLED).kind is Kind.KILLED
    assert diagnosed(GONE, found, None, kind=Kind.KILLED).kind is Kind.HARDWARE


def test_a_kill_of_an_earlier_engine_does_not_explain_a_worker_that_was_killed():
    found = parse_kernel(OOM)
    end = found[0].at + 60
    for since, kind in ((end - 90, Kind.MEMORY), (end - 30, Kind.KILLED)):
        assert diagnosed(GONE, relevant(found, end, since=since), None, kind=Kind.KILLED).kind is kind
