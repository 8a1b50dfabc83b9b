"""What the vendors' tools say of a node. The texts have the form of drivers 535 to 575, DCGM 3 and
4, infiniband-diags; the values are made up."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.gpus import Gpu, answering
from launcher.fleet.preflight.tools import (
    dcgm_problems,
    gpu_identity,
    gpu_information,
    gpu_problems,
    kernel_problems,
    nvlink_problems,
    port_problems,
    port_rates,
    ports,
)

SMI = """\
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<timestamp>Mon Nov  2 13:41:56 2026</timestamp>
\t<driver_version>570.86.15</driver_version>
\t<cuda_version>12.8</cuda_version>
\t<attached_gpus>1</attached_gpus>
\t<gpu id="00000000:1B:00.0">
\t\t<product_name>NVIDIA H100 80GB HBM3</product_name>
\t\t<uuid>GPU-11111111-2222-3333-4444-555555555555</uuid>
\t\t<gpu_reset_status>
\t\t\t<reset_required>Requested functionality has been deprecated</reset_required>
\t\t</gpu_reset_status>
\t\t<gpu_recovery_action>None</gpu_recovery_action>
\t\t<pci>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>5</max_link_gen>
\t\t\t\t\t<current_link_gen>1</current_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>16x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t\t<replay_counter>0</replay_counter>
\t\t</pci>
\t\t<clocks_event_reasons>
\t\t\t<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
\t\t\t<clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>
\t\t\t<clocks_event_reason_hw_slowdown>Not Active</clocks_event_reason_hw_slowdown>
\t\t\t<clocks_event_reason_hw_thermal_slowdown>Not Active</clocks_event_reason_hw_thermal_slowdown>
\t\t</clocks_event_reasons>
\t\t<ecc_mode>
\t\t\t<current_ecc>Enabled</current_ecc>
\t\t\t<pending_ecc>Enabled</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
\t\t\t\t<sram_correctable>3</sram_correctable>
\t\t\t\t<sram_uncorrectable_parity>0</sram_uncorrectable_parity>
\t\t\t\t<sram_uncorrectable_secded>N/A</sram_uncorrectable_secded>
\t\t\t\t<dram_correctable>7</dram_correctable>
\t\t\t\t<dram_uncorrectable>0</dram_uncorrectable>
\t\t\t</volatile>
\t\t\t<aggregate>
\t\t\t\t<dram_uncorrectable>4</dram_uncorrectable>
\t\t\t\t<sram_threshold_exceeded>No</sram_threshold_exceeded>
\t\t\t</aggregate>
\t\t</ecc_errors>
\t\t<remapped_rows>
\t\t\t<remapped_row_corr>1</remapped_row_corr>
\t\t\t<remapped_row_unc>1</remapped_row_unc>
\t\t\t<remapped_row_pending>No</remapped_row_pending>
\t\t\t<remapped_row_failure>No</remapped_row_failure>
\t\t</remapped_rows>
\t\t<fabric>
\t\t\t<state>Completed</state>
\t\t\t<status>Success</status>
\t\t\t<health>
\t\t\t\t<bandwidth>Full</bandwidth>
\t\t\t</health>
\t\t</fabric>
\t\t<processes>
\t\t</processes>
\t</gpu>
</nvidia_smi_log>
"""


USED = """\
<processes>
\t\t\t<process_info>
\t\t\t\t<pid>4711</pid>
\t\t\t\t<process_name>python</process_name>
\t\t\t</process_info>
"""


def levels(problems):
    return [wrong.level for wrong in problems]


def test_a_healthy_gpu_has_no_problem_and_an_identity():
    assert levels(gpu_problems(SMI)) == []
    assert gpu_identity(SMI) == "1 x NVIDIA H100 80GB HBM3, PCIe 5 16x"


@pytest.mark.parametrize(
    ("healthy", "sick", "level", "word"),
    [
        ("pending>No", "pending>Yes", "warn", "remap"),
        ("failure>No", "failure>Yes", "fail", "replaced"),
        ("exceeded>No", "exceeded>Yes", "fail", "SRAM"),
        ("<sram_uncorrectable_parity>0", "<sram_uncorrectable_parity>2", "fail", " 2 "),
        ("<dram_uncorrectable>0", "<dram_uncorrectable>1", "fail", " 1 uncorrectable ECC error "),
        ("current_ecc>Enabled", "current_ecc>Disabled", "warn", "ECC"),
        ("action>None", "action>Drain and Reset", "fail", "Drain and Reset"),
        ("hw_thermal_slowdown>Not Active", "hw_thermal_slowdown>Active", "fail", "cooling"),
        ("<current_link_width>16x", "<current_link_width>8x", "fail", "8 of 16"),
        ("<state>Completed", "<state>In Progress", "fail", "In Progress"),
        ("<status>Success", "<status>Insufficient resources", "fail", "Insufficient"),
        ("<bandwidth>Full", "<bandwidth>Degraded", "fail", "degraded"),
        ("<processes>\n", USED, "warn", "4711 (python)"),
    ],
)
def test_each_fault_of_a_gpu_is_named(healthy, sick, level, word):
    assert SMI.count(healthy) >= 1
    [(found, words, uuid)] = gpu_problems(SMI.replace(healthy, sick, 1))
    assert (found, uuid) == (level, "GPU-11111111-2222-3333-4444-555555555555")
    assert words.startswith("GPU 00000000:1B:00.0 ")
    assert word in words


def test_older_drivers_call_the_reasons_throttling():
    old = SMI.replace("clocks_event_reason", "clocks_throttle_reason")
    slow = old.replace("hw_slowdown>Not Active", "hw_slowdown>Active", 1)
    assert (levels(gpu_problems(old)), levels(gpu_problems(slow))) == ([], ["fail"])


def test_entities_are_not_expanded():
    bomb = SMI.replace("<nvidia_smi_log>", '<!DOCTYPE a [<!ENTITY b "c">]><nvidia_smi_log>', 1)
    assert levels(gpu_problems(bomb)) == ["warn"]
    assert gpu_identity(bomb) is None


UUIDS = [f"GPU-{digit * 8}-aaaa-bbbb-cccc-{digit * 12}" for digit in "01"]
NVLINK = f"""\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[0]})
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: {UUIDS[1]})
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
"""


def test_a_link_that_is_down_is_named():
    assert levels(nvlink_problems(NVLINK)) == []
    broken = NVLINK[::-1].replace("26.562 GB/s"[::-1], "<inactive>"[::-1], 1)[::-1]
    [(level, words, uuid)] = nvlink_problems(broken)
    assert (level, uuid) == ("fail", UUIDS[1])
    assert "GPU 1 has 1 of 2 NVLinks (down: 1)" in words


def test_gpus_without_nvlink_are_well():
    assert levels(nvlink_problems("GPU 0: NVIDIA L4 (UUID: GPU-1)\n")) == []
    assert levels(nvlink_problems(NVLINK.replace("26.562 GB/s", "<inactive>"))) == []


XID = "[  512.{n:06d}] NVRM: Xid (PCI:0000:1b:00): {xid}, pid='<unknown>', name=<unknown>, {what}\n"


@pytest.mark.parametrize(
    ("xid", "what", "level"),
    [
        (79, "GPU has fallen off the bus.", "fail"),
        (48, "An uncorrectable double bit error (DBE) has been detected", "fail"),
        (119, "Timeout waiting for RPC from GSP!", "fail"),
        (74, "NVLink: fatal error detected on link 3", "fail"),
        (94, "Contained: CE User Channel (0x9). RST: No, D-RST: No", None),
        (63, "Row Remapper: New row marked for remapping, reset gpu to activate", None),
        (31, "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS", None),
        (13, "Graphics Exception: ESR 0x404600=0x80000002", None),
        (45, "Ch 00000008", None),
    ],
)
def test_xids_that_count_against_the_machine(xid, what, level):
    text = XID.format(n=1, xid=xid, what=what) + XID.format(n=2, xid=xid, what=what)
    found = list(kernel_problems("[    0.000000] Linux version 6.8\n" + text))
    assert levels(found) == ([] if level is None else [level])
    if found:
        assert f"): {xid}," in found[0][1]
        assert "2 times" in found[0][1]


INFORMATION = """\
Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 423
GPU UUID: \t GPU-4a6f3f5e-0d3e-9f4a-8a53-8f9a2c1b7d60
Video BIOS: \t 96.00.74.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t 0000:1b:00.0
Device Minor: \t 0
GPU Firmware: \t 570.86.15
GPU Excluded:\t No
"""


def test_an_xid_names_the_gpu_also_one_that_has_fallen_off_the_bus():
    """nvidia-smi no longer lists it; the driver still does."""
    lost = gpu_information(INFORMATION)
    assert lost == Gpu("", "GPU-4a6f3f5e-0d3e-9f4a-8a53-8f9a2c1b7d60", "0000:1b:00.0")
    assert gpu_information(INFORMATION.replace("4a6f3f5e", "????????")) is None
    others = answering(f"0, {UUIDS[0]}, 00000000:4F:00.0\n1, {UUIDS[1]}, 00000000:5D:00.0\n")
    text = XID.format(n=1, xid=79, what="GPU has fallen off the bus.")
    text += XID.format(n=2, xid=48, what="DBE").replace(":1b:", ":5d:")
    text += XID.format(n=3, xid=74, what="NVLink").replace(":1b:", ":77:")
    found = {wrong.gpu: wrong.words for wrong in kernel_problems(text, [*others, lost])}
    assert found.keys() == {lost.uuid, UUIDS[1], ""}
    assert lost.uuid in found[lost.uuid]
    assert "): 79," in found[lost.uuid]
    assert "): 48," in found[UUIDS[1]]


IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 400
\t\tLink layer: InfiniBand
CA 'mlx5_2'
\tNumber of ports: 1
\tPort 1:
\t\tState: Down
\t\tPhysical state: Disabled
\t\tRate: 40
\t\tLink layer: Ethernet
"""


@pytest.mark.parametrize(
    ("state", "physical", "word"),
    [
        ("Down", "Polling", "cable"),
        ("Initializing", "LinkUp", "subnet manager"),
        ("Down", "LinkErrorRecovery", "cable"),
    ],
)
def test_ports_that_are_half_up_are_named(state, physical, word):
    assert levels(port_problems(ports(IBSTAT))) == []
    assert port_rates(ports(IBSTAT)) == [400.0, 400.0]
    sick = IBSTAT.replace("State: Active", f"State: {state}", 1).replace("LinkUp", physical, 1)
    [(level, words, _)] = port_problems(ports(sick))
    assert (level, port_rates(ports(sick))) == ("warn", [400.0])
    assert words.startswith(f"mlx5_0/1 is {state}")
    assert word in words


# https://github.com/leptonai/gpud/pull/752: a device that vanished while it was read.
CUT = """\
CA 'mlx5_7'
\tCA type: MT4129
\tNumber of ports: 1
\tFirmware version: 28.39.1002
\tHardware version: 0
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 200
\t\tBase lid: 13305
\t\tLMC: 0
\t\tSM lid: 1
\t\tLink layer: InfiniBand
ibpanic: [1323906] main: stat of IB device 'mlx5_8' failed: No such file or directory
"""


def test_a_device_that_cannot_be_read_counts_as_no_port():
    assert port_rates(ports(CUT)) == [200.0]
    assert levels(port_problems(ports(CUT))) == []


def dcgm(status, version=3):
    result = {"gpu_ids": "3", "status": status, "warnings": ["no peer access", "…"]}
    if version == 4:
        warnings = [{"error_id": 2, "warning": "no peer access"}]
        result = {"entity_group": "GPU", "entity_id": 3, "status": status, "warnings": warnings}
    test = {"name": "PCIe", "results": [result, None]}
    name = "DCGM Diagnostic" if version == 4 else "DCGM GPU Diagnostic"
    body = {"test_categories": [{"category": "Integration", "tests": [None, test]}]}
    return json.dumps({name: body, "metadata": {"version": "x"}})


@pytest.mark.parametrize("version", [3, 4])
def test_a_failed_diagnostic_is_named(version):
    for fine in ("Pass", "PASS", "Skip"):
        assert levels(dcgm_problems("WARNING: something\n" + dcgm(fine, version))) == []
    [(level, words, _)] = dcgm_problems(dcgm("Fail", version))
    assert (level, "PCIe on GPU 3: no peer access" in words) == ("fail", True)
    assert levels(dcgm_problems(dcgm("WARN", version))) == ["warn"]


def read_ports(text):
    return port_problems(ports(text))


READERS = (gpu_problems, nvlink_problems, kernel_problems, read_ports, dcgm_problems)


@pytest.mark.parametrize("reader", READERS)
@given(st.sampled_from([SMI, NVLINK, IBSTAT, dcgm("Fail")]), st.data())
def test_cut_or_garbled_output_is_no_traceback(reader, text, data):
    cut = data.draw(st.integers(0, len(text)))
    junk = data.draw(st.text(max_size=20))
    for level, words, _ in reader(text[:cut] + junk):
        assert level in ("warn", "fail")
        assert words
    port_rates(ports(text[:cut] + junk))
    gpu_identity(text[:cut] + junk)
    gpu_identity(junk + text[cut:])


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed because it couldn't communicate\n"])
def test_a_tool_that_says_nothing_useful_is_a_warning(text):
    assert levels(gpu_problems(text)) == ["warn"]
    assert levels(dcgm_problems(text)) == ["warn"]
    assert levels(dcgm_problems('{"DCGM Diagnostic": {"version": "4.2"}}')) == ["warn"]
