"""The accelerators known by name: vendors' figures and measured ceilings.

Sources: vendors' data sheets and the accelerator tables of stas00/ml-engineering.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Accelerator(NamedTuple):
    """One accelerator."""

    bf16_tflops: float | None
    """Dense bf16 peak in TFLOP/s; None where the vendor does not say."""
    memory_gb: int
    """Vendor's gigabytes of HBM."""
    scaleup_domain: int
    """GPUs joined by NVLink or xGMI."""
    nic_gbit: int
    """Typical network bandwidth per GPU in Gbit/s."""
    measured_tflops: float | None
    """Best bf16 matmul measured in TFLOP/s; None: not measured."""
    hbm_tbps: float
    """TB/s of the memory."""
    scaleup_gbps: int
    """GB/s of NVLink or xGMI per GPU, in one direction; of PCIe cards over the bridge of a pair."""
    watts: int
    """Thermal design power of one GPU."""
    pcie: int = 5
    """Generation of its 16 lanes to the host; NVLink-C2C of GB200 and GB300 is faster."""
    float8: bool = True
    """Multiplies matrices of float8, at twice the rate of bf16. Ampere and CDNA2 do not."""
    max_per_node: int | None = 8
    """Devices of the largest machine: HGX boards of 8, of A100 two; a tray of an NVL72 rack;
    platforms of 8 OAM modules. None: cards have no such limit."""

    @property
    def host_gbps(self) -> float:
        """GB/s of copies into pinned host memory: 0.8 of the link's 31.5 (PCIe 4.0) or 63 (5.0)."""
        return 0.8 * {4: 31.5, 5: 63.0}[self.pcie]


GPUS: Final[dict[str, Accelerator]] = {
    "A100-40GB-SXM": Accelerator(
        312, 40, 8, 200, 271.2, 1.555, 300, 400, pcie=4, float8=False, max_per_node=16
    ),
    "A100-80GB-SXM": Accelerator(
        312, 80, 8, 200, 271.2, 2.0, 300, 400, pcie=4, float8=False, max_per_node=16
    ),
    "A100-80GB-PCIe": Accelerator(
        312, 80, 2, 200, 252.9, 1.94, 300, 300, pcie=4, float8=False, max_per_node=None
    ),
    "A800-80GB-SXM": Accelerator(312, 80, 8, 200, None, 2.0, 200, 400, pcie=4, float8=False),
    "H100-80GB-SXM": Accelerator(989, 80, 8, 400, 794.5, 3.35, 450, 700),
    "H100-80GB-PCIe": Accelerator(756, 80, 2, 400, None, 2.0, 300, 350, max_per_node=None),
    "H100-96GB-HBM2e-500W": Accelerator(None, 96, 8, 400, None, 2.4, 450, 500, max_per_node=None),
    "H200-141GB-SXM": Accelerator(989, 141, 8, 400, 794.5, 4.8, 450, 700),
    "B200": Accelerator(2250, 180, 8, 400, 1745.0, 8.0, 900, 1000),
    "GB200": Accelerator(2500, 186, 72, 400, 1822.0, 8.0, 900, 1200, max_per_node=4),
    "B300": Accelerator(2250, 288, 8, 800, 1769.0, 8.0, 900, 1100),
    "GB300": Accelerator(2500, 288, 72, 800, None, 8.0, 900, 1400, max_per_node=4),
    "MI250X": Accelerator(
        383, 128, 8, 200, None, 3.28, 350, 560, pcie=4, float8=False, max_per_node=16
    ),
    "MI300X": Accelerator(1307, 192, 8, 400, 668.4, 5.3, 448, 750),
}
"""Name -> figures. MI250X is the whole package; each of its two dies is a device of half."""

CPU: Final = "cpu"
"""The emulated cluster: workers on processors, over gloo."""


def tight_domain(gpu: str, gpus_per_node: int) -> int:
    """Return how many consecutive ranks share one node, or one NVLink domain of a whole rack."""
    domain = GPUS[gpu].scaleup_domain if gpu in GPUS else 1
    rack = domain > 8 and domain % gpus_per_node == 0
    return max(domain, gpus_per_node) if rack else gpus_per_node


def device_memory_gib(gpu: str) -> float | None:
    """Return the memory of one device in GiB; None for processors and unknown GPUs.

    Vendors' GB are GiB less a percent: nvidia-smi shows 81,559 MiB on an H100 of 80 GB and 143,771
    MiB on an H200 of 141 GB.
    """
    if gpu not in GPUS:
        return None
    dies = 2 if gpu == "MI250X" else 1
    return 0.99 * GPUS[gpu].memory_gb / dies
