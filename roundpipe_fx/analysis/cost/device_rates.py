"""Rates of devices: peaks from vendors' data sheets, and the shares of them that kernels reach.

A peak is a device's; a share is an architecture's, and each has its source. The roofline multiplies them::

    peak (data sheet)  ×  share (measured by whom)  =  rate of the roofline
    989 TFLOP/s        ×  0.70                      =  692 TFLOP/s of products on an H200

Shares are of kernels inside a model, one after the other, with clocks that the power limit allows. The best product of
many tried reaches more: where only that is published, it is lowered by the factor by which the products of a model on
an H200 fall short of the best ones there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of a peak, or a number of seconds.

    Attributes:
        source: who has measured it, and how.
    """

    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Attained shares of an architecture's peaks.

    Attributes:
        products: of matrices in half precision.
        float32_products: of matrices in float32 and float64, with and without TF32.
        attention_forward: of attention kernels; of the peak of products in half precision, as is
            ``attention_backward``.
        memory: of copies and pointwise operations.
        host: of the link to the host, one direction at a time.
        host_both_ways: of the rate of one direction, what each has while both are busy.
        kernel_seconds: between the ends of kernels that do nothing and follow one another, if the host is ahead.
        launch_seconds: of the host's, to launch an operation.
    """

    products: Rate
    float32_products: Rate
    attention_forward: Rate
    attention_backward: Rate
    memory: Rate
    host: Rate
    host_both_ways: Rate
    kernel_seconds: Rate
    launch_seconds: Rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peaks of a device: dense, as its vendor's data sheet says.

    Attributes:
        half: operations per second of products in float16 or bfloat16 that sum in float32.
        half_sums: of products in float16 that sum in float16.
        tf32: of products in float32 whose operands are rounded to TF32.
        float32: of products in float32.
        float64: of products in float64.
        memory: bytes per second of the device's memory.
        host: bytes per second of the link to the host, in each direction.
        link: bytes per second to another device, in each direction: NVLink, or PCIe.
        between: bytes per second of the network adapter, for each device.
    """

    half: float
    half_sums: float
    tf32: float
    float32: float
    float64: float
    memory: float
    host: float
    link: float
    between: float
    gib: int


_MAMF = "github.com/stas00/ml-engineering, compute/accelerator: the best product of many shapes"
_RUN = "one run on one H200 (PyTorch 2.11), tests/analysis/cost/h200_timeline.json"
_FLASH_2_PAPER = "Dao, FlashAttention-2, arXiv:2307.08691"
_FLASH_ON_H100 = "github.com/Dao-AILab/flash-attention/pull/1791: FlashAttention-2, causal, 8,192 tokens, heads of 128"
_KERNELS = "python -m benchmarks.published_kernels"
_NO_FIGURE = "no figure was found; as on"

_HOPPER_PRODUCTS = 0.70
_IN_A_MODEL = _HOPPER_PRODUCTS / 0.803
"""Products of a model beside the best one, on Hopper."""

_KERNEL = Rate(1.5e-6, f"{_RUN}: actions follow one another 1.2 to 2.4 µs apart where the host is ahead")
_LAUNCH = Rate(4e-6, "assumed; the calibration measures it")
_PCIE_4 = Rate(0.78, f"{_KERNELS}: 23.9 to 26.4 GB/s of 32")
_PCIE_4_BOTH = Rate(0.78, f"{_KERNELS}: 20.7 GB/s in each direction between two GPUs, of 26.4")
_PCIE_5 = Rate(0.85, f"{_RUN}: the first 824 MB arrive after 15.2 ms")
_PCIE_5_BOTH = Rate(0.905, f"{_KERNELS}: 50.9 GB/s of 56.3 alone")

HOPPER = Shares(
    products=Rate(_HOPPER_PRODUCTS, f"{_RUN}: 0.65 to 0.72 once clocks have settled; {_MAMF} has 0.803"),
    float32_products=Rate(_HOPPER_PRODUCTS, f"{_NO_FIGURE} half precision"),
    attention_forward=Rate(0.287, _FLASH_ON_H100),
    attention_backward=Rate(0.290, _FLASH_ON_H100),
    memory=Rate(0.9, _RUN),
    host=_PCIE_5,
    host_both_ways=_PCIE_5_BOTH,
    kernel_seconds=_KERNEL,
    launch_seconds=_LAUNCH,
)
AMPERE = Shares(
    products=Rate(0.80, f"{_MAMF} has 0.869, and whole steps of a model 0.72 ({_FLASH_2_PAPER})"),
    float32_products=Rate(0.80, f"{_NO_FIGURE} half precision"),
    attention_forward=Rate(0.73, f"{_FLASH_2_PAPER}: the most it reaches on an A100"),
    attention_backward=Rate(0.63, f"{_FLASH_2_PAPER}: the most it reaches on an A100"),
    memory=Rate(0.9, f"{_NO_FIGURE} Hopper"),
    host=_PCIE_4,
    host_both_ways=_PCIE_4_BOTH,
    kernel_seconds=_KERNEL,
    launch_seconds=_LAUNCH,
)
ADA = Shares(
    products=Rate(round(0.96 * _IN_A_MODEL, 2), f"{_KERNELS}: the best of two sizes has 0.96 to 1.01"),
    float32_products=Rate(round(0.96 * _IN_A_MODEL, 2), f"{_NO_FIGURE} half precision"),
    attention_forward=Rate(0.97, f"{_KERNELS}: between those without a mask and with a causal one"),
    attention_backward=Rate(0.68, f"{_KERNELS}: between those without a mask and with a causal one"),
    memory=Rate(0.91, _KERNELS),
    host=_PCIE_4,
    host_both_ways=_PCIE_4_BOTH,
    kernel_seconds=_KERNEL,
    launch_seconds=_LAUNCH,
)
"""Of an RTX 4090. Other devices whose half precision sums in float32 at half the rate, and an L40S, are taken to be
alike."""

_PCIE_4_PEAK, _PCIE_5_PEAK = 32e9, 64e9
_SHARED = 12.5e9 / 8

_H100 = Peaks(
    half=989e12,
    half_sums=989e12,
    tf32=494e12,
    float32=67e12,
    float64=67e12,
    memory=3.35e12,
    host=_PCIE_5_PEAK,
    link=450e9,
    between=50e9,
    gib=80,
)

# Eight devices are a node: DGX A100 and DGX H100 or H200 have a network adapter for each device, of 200 and 400 Gb/s
# (NVIDIA's data sheets); where devices have no NVLink, one of 100 Gb/s that eight share is assumed.
ARCHITECTURES: Mapping[str, tuple[Peaks, Shares]] = {
    "A100": (
        Peaks(
            half=312e12,
            half_sums=312e12,
            tf32=156e12,
            float32=19.5e12,
            float64=19.5e12,
            memory=2.0e12,
            host=_PCIE_4_PEAK,
            link=300e9,
            between=25e9,
            gib=80,
        ),
        AMPERE,
    ),
    "H100": (_H100, HOPPER),
    "H200": (dataclasses.replace(_H100, memory=4.8e12, gib=141), HOPPER),
    "L40S": (
        Peaks(
            half=362e12,
            half_sums=362e12,
            tf32=183e12,
            float32=91.6e12,
            float64=1.4e12,
            memory=0.864e12,
            host=_PCIE_4_PEAK,
            link=_PCIE_4_PEAK,
            between=_SHARED,
            gib=48,
        ),
        ADA,
    ),
    "RTX 3090": (
        Peaks(
            half=71e12,
            half_sums=142e12,
            tf32=35.6e12,
            float32=35.6e12,
            float64=0.56e12,
            memory=0.936e12,
            host=_PCIE_4_PEAK,
            link=_PCIE_4_PEAK,
            between=_SHARED,
            gib=24,
        ),
        ADA,
    ),
    "RTX 4090": (
        Peaks(
            half=165.2e12,
            half_sums=330.3e12,
            tf32=82.6e12,
            float32=82.6e12,
            float64=1.3e12,
            memory=1.008e12,
            host=_PCIE_4_PEAK,
            link=_PCIE_4_PEAK,
            between=_SHARED,
            gib=24,
        ),
        ADA,
    ),
}
