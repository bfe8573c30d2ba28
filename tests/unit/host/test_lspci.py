"""`lspci -vvv` as people post it, by several releases, with or without -nn, -D, root. Figures and shapes are real."""

from __future__ import annotations

import pytest
from aerie_host import lspci
from aerie_host.pci import NVIDIA, Acs, Bar, Link, ResizableBar, Slot

# pciutils 3.7, no -D, no -nn: a root port of a Zen workstation with a professional GPU at rest, small BAR above 4 GiB.
ZEN = """\
00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Starship/Matisse GPP Bridge (prog-if 00 [Normal decode])
\tControl: I/O+ Mem+ BusMaster+ SpecCycle- MemWINV- VGASnoop- ParErr- Stepping- SERR- FastB2B- DisINTx+
\tBus: primary=00, secondary=41, subordinate=41, sec-latency=0
\tPrefetchable memory behind bridge: 0000028060000000-0000028071ffffff [size=288M]
\tCapabilities: [58] Express (v2) Root Port (Slot+), MSI 00
\t\tDevCap:\tMaxPayload 512 bytes, PhantFunc 0
\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM L1, Exit Latency L1 <64us
\t\t\tClockPM- Surprise- LLActRep+ BwNot+ ASPMOptComp+
\t\tLnkCtl:\tASPM Disabled; RCB 64 bytes, Disabled- CommClk+
\t\t\tExtSynch- ClockPM- AutWidDis- BWInt- AutBWInt-
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16 (ok)
\t\t\tTrErr- Train- SlotClk+ DLActive+ BWMgmt+ ABWMgmt-
\t\tSltCap:\tAttnBtn- PwrCtrl- MRL- AttnInd- PwrInd- HotPlug- Surprise-
\t\t\tSlot #3, PowerLimit 75.000W; Interlock- NoCompl+
\t\tSltCtl:\tEnable: AttnBtn- PwrFlt- MRL- PresDet- CmdCplt- HPIrq- LinkChg-
\t\t\tControl: AttnInd Unknown, PwrInd Unknown, Power- Interlock-
\t\tSltSta:\tStatus: AttnBtn- PowerFlt- MRL- CmdCplt- PresDet+ Interlock-
\t\t\tChanged: MRL- PresDet- LinkState+
\t\tLnkCap2: Supported Link Speeds: 2.5-16GT/s, Crosslink- Retimer+ 2Retimers+ DRS-
\t\tLnkCtl2: Target Link Speed: 16GT/s, EnterCompliance- SpeedDis-
\t\tLnkSta2: Current De-emphasis Level: -3.5dB, EqualizationComplete+ EqualizationPhase1+
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
\tKernel driver in use: pcieport

41:00.0 VGA compatible controller: NVIDIA Corporation GA102GL [RTX A6000] (rev a1) (prog-if 00 [VGA controller])
\tNUMA node: 0
\tIOMMU group: 17
\tRegion 0: Memory at b0000000 (32-bit, non-prefetchable) [size=16M]
\tRegion 1: Memory at 28060000000 (64-bit, prefetchable) [size=256M]
\tRegion 3: Memory at 28070000000 (64-bit, prefetchable) [size=32M]
\tRegion 5: I/O ports at 7000 [size=128]
\tExpansion ROM at b1000000 [virtual] [disabled] [size=512K]
\tCapabilities: [78] Express (v2) Legacy Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 16GT/s, Width x16, ASPM L0s L1, Exit Latency L0s <512ns, L1 <4us
\t\t\tClockPM+ Surprise- LLActRep- BwNot- ASPMOptComp+
\t\tLnkCtl:\tASPM Disabled; RCB 64 bytes, Disabled- CommClk+
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x16 (ok)
\t\t\tTrErr- Train- SlotClk+ DLActive- BWMgmt- ABWMgmt-
\tCapabilities: [bb0 v1] Physical Resizable BAR
\t\tBAR 0: current size: 16MB, supported: 16MB
\t\tBAR 1: current size: 256MB, supported: 64MB 128MB 256MB 512MB 1GB 2GB 4GB 8GB 16GB 32GB 64GB
\t\tBAR 3: current size: 32MB, supported: 32MB
\tKernel driver in use: nvidia
\tKernel modules: nvidiafb, nouveau, nvidia_drm, nvidia
"""

# pciutils 3.1, whose link state is one line and whose slot number is padded; a switch of its own with an upstream port.
OLD = """\
03:00.0 PCI bridge: nVidia Corporation Device 05b1 (rev a2)
    Bus: primary=03, secondary=04, subordinate=04, sec-latency=0
    Capabilities: [60] Express (v2) Downstream Port (Slot+), MSI 00
        LnkCap:    Port #0, Speed 5GT/s, Width x16, ASPM L0s, Latency L0 <512ns, L1 <4us
            ClockPM- Suprise- LLActRep+ BwNot+
        LnkCtl:    ASPM Disabled; Disabled- Retrain- CommClk-
            ExtSynch- ClockPM- AutWidDis- BWInt- AutBWInt-
        LnkSta:    Speed 5GT/s, Width x8, TrErr- Train- SlotClk+ DLActive+ BWMgmt+ ABWMgmt-
        SltCap:    AttnBtn- PwrCtrl- MRL- AttnInd- PwrInd- HotPlug- Surpise-
            Slot #  1, PowerLimit 0.000000; Interlock- NoCompl-
        SltSta:    Status: AttnBtn- PowerFlt- MRL- CmdCplt- PresDet+ Interlock-
"""

# pciutils 3.13 with -D and -nn: an empty slot that can be switched off, and a port whose speed has no name yet.
NEW = """\
0000:00:1c.0 PCI bridge [0604]: Intel Corporation Device [8086:7a38] (rev 11) (prog-if 00 [Normal decode])
\tBus: primary=00, secondary=05, subordinate=05, sec-latency=0
\tCapabilities: [40] Express (v2) Root Port (Slot+), IntMsgNum 0
\t\tLnkCap:\tPort #1, Speed unknown, Width x4, ASPM L0s L1, Exit Latency L0s <1us, L1 <4us
\t\t\tClockPM- Surprise- LLActRep+ BwNot+ ASPMOptComp+
\t\tLnkCtl:\tASPM L0s L1 Enabled; RCB 64 bytes, LnkDisable- CommClk-
\t\tLnkSta:\tSpeed 2.5GT/s, Width x0
\t\t\tTrErr- Train- SlotClk+ DLActive- BWMgmt- ABWMgmt-
\t\tSltCap:\tAttnBtn- PwrCtrl+ MRL- AttnInd- PwrInd- HotPlug+ Surprise+
\t\t\tSlot #7, PowerLimit 0W; Interlock- NoCompl+
\t\tSltCtl:\tEnable: AttnBtn- PwrFlt- MRL- PresDet+ CmdCplt- HPIrq+ LinkChg+
\t\t\tControl: AttnInd Unknown, PwrInd Unknown, Power+ Interlock-
\t\tSltSta:\tStatus: AttnBtn- PowerFlt- MRL- CmdCplt- PresDet- Interlock-
"""

FALLEN = """\
41:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev ff) (prog-if ff)
\t!!! Unknown header type 7f
\tKernel driver in use: nvidia
"""

UNPRIVILEGED = """\
41:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)
\tRegion 1: Memory at <unassigned> (64-bit, prefetchable) [disabled] [size=256M]
\tCapabilities: <access denied>
\tKernel driver in use: nvidia
"""


def test_a_root_port_with_acs_and_a_slot() -> None:
    port = lspci.parse_lspci(ZEN)["0000:00:01.1"]
    assert (port.kind, port.is_bridge, port.buses, port.driver) == ("root port", True, (0, 0x41, 0x41), "pcieport")
    assert port.link == Link(2.5, 16, 16.0, 16, active=True)
    assert port.acs == Acs(0x2A0, 0x5F, 0x1D)
    assert port.slot == Slot(3, present=True, powered=None, hotplug=False)


def test_a_gpu_at_rest_below_it() -> None:
    gpu = lspci.parse_lspci(ZEN)["0000:41:00.0"]
    assert (gpu.is_gpu, gpu.vendor, gpu.kind, gpu.numa_node, gpu.iommu_group) == (True, NVIDIA, "endpoint", 0, 17)
    assert gpu.path == ("0000:00:01.1", "0000:41:00.0")
    assert gpu.link == Link(2.5, 16, 16.0, 16, active=None)
    assert gpu.bars[1] == Bar(1, 256 << 20, 0x28060000000, prefetchable=True)
    assert [bar.index for bar in gpu.bars] == [0, 1, 3]
    assert gpu.resizable[1] == ResizableBar(1, 256 << 20, tuple(1 << bit for bit in range(26, 37)))


def test_an_old_release() -> None:
    port = lspci.parse_lspci(OLD)["0000:03:00.0"]
    assert (port.kind, port.device) == ("downstream", 0x05B1)
    assert port.link == Link(5.0, 8, 5.0, 16, active=True)
    assert port.slot == Slot(1, present=True, powered=None, hotplug=False)


def test_a_new_release_and_an_empty_slot_without_power() -> None:
    port = lspci.parse_lspci(NEW)["0000:00:1c.0"]
    assert (port.vendor, port.device, port.class_code) == (0x8086, 0x7A38, 0x060400)
    assert port.link == Link(2.5, 0, None, 4, active=False)
    assert port.slot == Slot(7, present=False, powered=False, hotplug=True)


def test_one_that_fell_off_the_bus() -> None:
    gpu = lspci.parse_lspci(FALLEN)["0000:41:00.0"]
    assert (gpu.answers, gpu.is_gpu, gpu.link, gpu.driver) == (False, True, None, "nvidia")


def test_without_root_capabilities_are_unknown() -> None:
    gpu = lspci.parse_lspci(UNPRIVILEGED)["0000:41:00.0"]
    assert (gpu.whole, gpu.link, gpu.device) == (False, None, 0x2BB5)
    assert gpu.bars == (Bar(1, 256 << 20, 0, prefetchable=True),)


@pytest.mark.parametrize("text", ["", "no devices here\n", "\n\n"])
def test_nothing_is_no_device(text: str) -> None:
    assert lspci.parse_lspci(text) == {}


def test_a_bridge_that_names_itself_as_its_child_ends() -> None:
    text = "04:00.0 PCI bridge: Intel Corporation Device 0001\n\tBus: primary=04, secondary=04, subordinate=04\n"
    assert lspci.parse_lspci(text)["0000:04:00.0"].path == ("0000:04:00.0",)
