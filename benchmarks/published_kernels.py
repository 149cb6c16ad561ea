"""The roofline's rates of a GPU beside those that others have measured: python -m benchmarks.published_kernels

Figures are as their sources print them. A product of matrices has the modelled seconds of reading and writing them
once; of attention, which is bound by its arithmetic, and of copies the rate is that of the roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.side_by_side import rates_of, report
from roundpipe_fx.analysis.cost import DEVICES, Roofline

_RTX_4090 = "RTX 4090"
_PCIE_5 = "H100"  # any with as fast a link to the host


def _product(size: int) -> Callable[[Roofline], float]:
    """The rate of a product of square matrices in half precision, in TFLOP/s."""

    def rate(roofline: Roofline) -> float:
        flops = 2 * size**3
        return flops / roofline.seconds(flops, 3 * 2 * size**2, torch.float16) / 1e12

    return rate


def _attention_forward(roofline: Roofline) -> float:
    return roofline.attention_forward[torch.float16] / 1e12


def _attention_backward(roofline: Roofline) -> float:
    return roofline.attention_backward[torch.float16] / 1e12


def _memory(roofline: Roofline) -> float:
    return roofline.bandwidth / 1e9


def _host(roofline: Roofline) -> float:
    return roofline.host / 1e9


def _host_both_ways(roofline: Roofline) -> float:
    return roofline.both_ways * _host(roofline)


@dataclass(frozen=True, kw_only=True)
class _Rate:
    """A measured rate.

    Attributes:
        operation: what was measured.
        unit: of the rate.
        published: the rate.
        modelled: returns the roofline's.
        source: where it is printed.
        device: name of the roofline.
    """

    operation: str
    unit: str
    published: float
    modelled: Callable[[Roofline], float]
    source: str
    device: str = _RTX_4090


_PRODUCTS = "github.com/mli/transformers-benchmarks/issues/4 (PyTorch 1.14, CUDA 12.0)"
_ATTENTION = "apache/tvm, tl_doc/flash_perf.md (CUDA 12.2, columns Flash_attn)"
_COPIES = "github.com/NVIDIA/nvbandwidth/issues/15 (v0.2, a machine with eight)"
_COPIES_OF_PCIE_5 = "github.com/tinygrad/open-gpu-kernel-modules/issues/29 (the first of eight)"
_RATES = (
    _Rate(
        operation="product of 2,048 × 2,048, float16",
        unit="TFLOP/s",
        published=167.112,
        modelled=_product(2048),
        source=_PRODUCTS,
    ),
    _Rate(
        operation="product of 8,192 × 8,192, float16",
        unit="TFLOP/s",
        published=158.596,
        modelled=_product(8192),
        source=_PRODUCTS,
    ),
    _Rate(
        operation="attention of 2,048 tokens, heads of 128",
        unit="TFLOP/s",
        published=169.28,
        modelled=_attention_forward,
        source=_ATTENTION,
    ),
    _Rate(
        operation="the same, causal",
        unit="TFLOP/s",
        published=151.19,
        modelled=_attention_forward,
        source=_ATTENTION,
    ),
    _Rate(
        operation="its backward, not causal",
        unit="TFLOP/s",
        published=124.57,
        modelled=_attention_backward,
        source=_ATTENTION,
    ),
    _Rate(
        operation="its backward, causal",
        unit="TFLOP/s",
        published=99.23,
        modelled=_attention_backward,
        source=_ATTENTION,
    ),
    _Rate(
        operation="memory of the device",
        unit="GB/s",
        published=921.32,
        modelled=_memory,
        source="github.com/krrishnarraj/clpeak/issues/106 (power limited to 248 W)",
    ),
    _Rate(
        operation="from the host, the slowest of eight GPUs",
        unit="GB/s",
        published=23.90,
        modelled=_host,
        source=_COPIES,
    ),
    _Rate(
        operation="from the host, the fastest of eight GPUs",
        unit="GB/s",
        published=26.38,
        modelled=_host,
        source=_COPIES,
    ),
    _Rate(
        operation="to the host, the slowest of eight GPUs",
        unit="GB/s",
        published=26.25,
        modelled=_host,
        source=_COPIES,
    ),
    _Rate(
        operation="to the host, the fastest of eight GPUs",
        unit="GB/s",
        published=27.11,
        modelled=_host,
        source=_COPIES,
    ),
    _Rate(
        operation="from the host, beside a copy to it, the first of eight GPUs",
        unit="GB/s",
        published=11.24,
        modelled=_host_both_ways,
        source=_COPIES,
    ),
    _Rate(
        operation="the same between two GPUs, without the host's memory",
        unit="GB/s",
        published=41.38 / 2,
        modelled=_host_both_ways,
        source="github.com/tinygrad/open-gpu-kernel-modules/issues/6 (three, half of both directions)",
    ),
    _Rate(
        operation="from the host, over PCIe 5 (RTX 5090)",
        unit="GB/s",
        published=56.30,
        modelled=_host,
        source=_COPIES_OF_PCIE_5,
        device=_PCIE_5,
    ),
    _Rate(
        operation="the same, beside a copy to it",
        unit="GB/s",
        published=50.94,
        modelled=_host_both_ways,
        source=_COPIES_OF_PCIE_5,
        device=_PCIE_5,
    ),
)


def main() -> None:
    report(
        "published_kernels",
        f"Rates of one {_RTX_4090}, where no other is named: {DEVICES[_RTX_4090].rates}, and published ones",
        [*map(_row, _RATES)],
        rates_of(_RTX_4090, _PCIE_5),
    )


def _row(rate: _Rate) -> dict[str, Any]:
    modelled = rate.modelled(DEVICES[rate.device])
    return {
        "operation": rate.operation,
        "unit": rate.unit,
        "roofline": modelled,
        "published": rate.published,
        "published / roofline": rate.published / modelled,
        "source": rate.source,
    }


if __name__ == "__main__":
    main()
