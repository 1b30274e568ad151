"""Dense bf16 peaks of known GPUs, by the exact name that the driver gives them, from NVIDIA's datasheets.

Figures with sparsity are halved. A name that is not listed (a part of a GPU under MIG, a card of another power
class) has no peak, and no MFU is computed against one that was guessed.
"""

from __future__ import annotations

TERA = 10**12
SOURCE = "dense bf16 by the vendor's datasheet"

# FLOP/s of dense bf16 with float32 accumulation.
DENSE_BF16: dict[str, int] = {
    "NVIDIA A10": 125 * TERA,
    "NVIDIA A100-PCIE-40GB": 312 * TERA,
    "NVIDIA A100 80GB PCIe": 312 * TERA,
    "NVIDIA A100-SXM4-40GB": 312 * TERA,
    "NVIDIA A100-SXM4-80GB": 312 * TERA,
    "NVIDIA A30": 165 * TERA,
    "NVIDIA A40": 149_700 * 10**9,
    "NVIDIA B200": 2_250 * TERA,
    "NVIDIA GH200 480GB": 989 * TERA,
    "NVIDIA H100 80GB HBM3": 989 * TERA,
    "NVIDIA H100 NVL": 835 * TERA,
    "NVIDIA H100 PCIe": 756 * TERA,
    "NVIDIA H20": 148 * TERA,
    "NVIDIA H200": 989 * TERA,
    "NVIDIA H200 NVL": 835 * TERA,
    "NVIDIA L20": 119_500 * 10**9,
    "NVIDIA L4": 121 * TERA,
    "NVIDIA L40": 181 * TERA,
    "NVIDIA L40S": 362 * TERA,
    "NVIDIA RTX 6000 Ada Generation": 364 * TERA,
}


def peak(device_name: str, arithmetic: str) -> int | None:
    """FLOP/s of one device in that arithmetic (`bfloat16` is the only one known); None: unknown."""
    return DENSE_BF16.get(device_name) if arithmetic == "bfloat16" else None
