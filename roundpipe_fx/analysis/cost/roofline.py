"""The roofline model: an operation takes the longer of its arithmetic time and its memory time.

Deterministic on purpose — the same graph always gets the same cost, so plans and golden files are stable. Williams,
Waterman, Patterson, "Roofline: an insightful visual performance model", 2009. Flop counts are PyTorch's own
(``torch.utils.flop_counter``), except for causal attention, all of whose scores it counts. Random numbers are added:
the CPU's generator draws sequentially, whatever the number of threads (measured by ``benchmarks/drawing.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.cost.network import Network, collective_seconds, usual_network
from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.joint_graph import has_tag
from roundpipe_fx.operators.gradient_sums import add_product_to
from roundpipe_fx.torch_private import tree_leaves, tree_map

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The limits of a device.

    Attributes:
        name: name of the device.
        flops: attainable floating-point operations per second, by dtype; other dtypes count as ``torch.float32``.
        bandwidth: memory bandwidth in bytes per second.
        link: bytes per second from this device to another one.
        host: bytes per second between this device and the host, in each direction.
        overhead: seconds of launching an operation, independent of its size.
        network: the usual links between such devices, of one node or many.
        memory: bytes of memory of the device; 0 if it is not fixed.
        draw: seconds of drawing a random number, in addition to writing it.
        full: number of elements of a result from which on a kernel keeps the whole device busy.
        attention_backward: share of ``flops`` that the backward of an attention kernel attains.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    bandwidth: float
    link: float
    host: float
    overhead: float
    network: Network
    memory: int = 0
    draw: float = 0.0
    full: int = 1 << 15
    """ATen's grain size: with fewer elements a kernel runs on one thread of the CPU (``ATen/Parallel.h``)."""
    attention_backward: float = 1.0

    def node_seconds(self, node: fx.Node, flops: int, traffic: int, dtype: torch.dtype) -> float:
        """Modelled seconds of a node's operation."""
        if is_collective(node.target):
            sent = collective_seconds(node, self.network)
            if sent is not None:
                return sent
        operators = [node.target, *(argument for argument in node.args if isinstance(argument, torch._ops.OpOverload))]
        if getattr(node.target, "overloadpacket", None) in _ATTENTION_BACKWARDS:
            flops = round(flops / self.attention_backward)
        return self.seconds(flops, traffic, dtype, numbers_drawn(operators[-1], node.meta.get("val")))

    def seconds(self, flops: int, traffic: int, dtype: torch.dtype = torch.float32, draws: int = 0) -> float:
        """Modelled seconds of an operation with ``flops``, ``traffic`` in bytes, and ``draws`` random numbers."""
        peak = self.flops.get(dtype, self.flops[torch.float32])
        return max(flops / peak, traffic / self.bandwidth) + draws * self.draw + self.overhead

    def transfer_seconds(self, size: int) -> float:
        """Modelled seconds of sending ``size`` bytes to another device."""
        return size / self.link


_ATTENTION_BACKWARDS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
    }
)
_ATTENTION_BACKWARD = 0.7
"""Between what is published for kernels without a mask and with a causal one (``benchmarks/published_kernels.py``)."""

_RESIDENT_ELEMENTS = 1 << 20
"""About a hundred multiprocessors with 2,048 threads, each of which computes some four elements."""


_PCIE = 32e9
_SHARED = 12.5e9 / 8


def _gpu(
    name: str, fp32: float, half: float, bandwidth: float, link: float, host: float, gib: int, between: float
) -> Roofline:
    rates = {torch.float32: fp32, torch.float16: half, torch.bfloat16: half, torch.float64: fp32 / 2}
    return Roofline(
        name=name,
        flops=rates,
        bandwidth=bandwidth,
        link=link,
        host=host,
        overhead=4e-6,
        network=usual_network(link, link > _PCIE, between),
        memory=gib * 2**30,
        full=_RESIDENT_ELEMENTS,
        attention_backward=_ATTENTION_BACKWARD,
    )


# Vendors' dense peak figures, rounded; links are PCIe or NVLink per direction. To the host 25 of
# the 32 GB/s of PCIe 4, and 50 of the 64 GB/s of PCIe 5, are taken to be attained. Eight devices are a node: DGX A100
# and DGX H100 or H200 have a network adapter for each device, of 200 and 400 Gb/s (NVIDIA's data sheets); where devices
# have no NVLink, one of 100 Gb/s that eight share is assumed.
DEVICES: Mapping[str, Roofline] = {
    "cpu": Roofline(
        name="CPU",
        flops={torch.float32: 1e11, torch.float64: 5e10, torch.bfloat16: 1e11},
        bandwidth=2e10,
        link=2e10,
        host=2e10,
        overhead=2e-6,
        network=usual_network(2e10, False, _SHARED),
        draw=5e-9,
    ),
    "A100": _gpu("A100", 19.5e12, 312e12, 2.0e12, 300e9, 25e9, 80, 25e9),
    "H100": _gpu("H100", 67e12, 989e12, 3.35e12, 450e9, 50e9, 80, 50e9),
    "H200": _gpu("H200", 67e12, 989e12, 4.8e12, 450e9, 50e9, 141, 50e9),
    "L40S": _gpu("L40S", 91e12, 362e12, 0.864e12, _PCIE, 25e9, 48, _SHARED),
    "RTX 3090": _gpu("RTX 3090", 35.6e12, 71e12, 0.936e12, _PCIE, 25e9, 24, _SHARED),
    "RTX 4090": _gpu("RTX 4090", 82.6e12, 165e12, 1.008e12, _PCIE, 25e9, 24, _SHARED),
}


def roofline_of(device: torch.device, name: str | None = None) -> Roofline:
    """The roofline of a device: by its reported name if that is in the table, else a typical one.

    Args:
        device: the device.
        name: name of a device in the table to model instead of ``device``.
    """
    if name is not None:
        return DEVICES[name]
    if device.type == "cuda" and torch.cuda.is_available():
        reported = torch.cuda.get_device_name(device)
        for name, roofline in DEVICES.items():
            if name in reported:
                return roofline
    return DEVICES["cpu"] if device.type in ("cpu", "meta") else DEVICES["A100"]


# What PyTorch's flop counter does not know, with what takes the same arguments: the CPU's attention, sums of products.
_SAME_FLOPS: Mapping[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    add_product_to: aten.addmm,
}


def flops_of(node: fx.Node) -> int:
    """Floating-point operations of an FX node, 0 where PyTorch's flop counter has no formula (pointwise, views)."""
    return flops_of_call(node.target, node.args, node.kwargs, node.meta.get("val"))


def flops_of_call(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of an operator's call; operands may be nodes or tensors."""
    packet = getattr(target, "overloadpacket", target)
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs, out = tree_map(_shape, (args, kwargs, result))
    computed, counted = _scores(target, args, kwargs)
    return int(formula(*_with_all_heads(target, args), **kwargs, out_val=out)) * computed // counted


def _with_all_heads(target: Any, args: Sequence[Any]) -> list[Any]:
    """Arguments of grouped attention with a head of keys and values for each of the queries': what kernels compute.

    Before torch 2.12, PyTorch's formulas refuse groups.

    Args:
        target: any operator.
        args: its arguments by position, shapes instead of tensors.
    """
    args = list(args)
    if isinstance(target, torch._ops.OpOverload):
        positions = {argument.name: position for position, argument in enumerate(target._schema.arguments)}
        if positions.keys() >= {"query", "key", "value"} and max(positions["query"], positions["value"]) < len(args):
            queries = args[positions["query"]]
            for name in ("key", "value"):
                batch, _, *rest = args[positions[name]]
                args[positions[name]] = torch.Size([batch, queries[1], *rest])
    return args


def _scores(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Scores of causal attention that are computed, and those that PyTorch counts: kernels skip what a mask hides.

    Args:
        target: any operator.
        args: its arguments, shapes instead of tensors.
        kwargs: likewise.

    Returns:
        both for each head; 1 and 1 for other operators.
    """
    if not isinstance(target, torch._ops.OpOverload):
        return 1, 1
    names = (argument.name for argument in target._schema.arguments)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    if not named.get("is_causal"):
        return 1, 1
    queries, keys = named["query"][-2], named["key"][-2]
    seen = min(queries, keys)  # query i, from 0, sees keys 0 to i
    return seen * (seen + 1) // 2 + (queries - seen) * keys, max(queries * keys, 1)


def numbers_drawn(target: Any, result: Any) -> int:
    """Random numbers that an operator draws for its result.

    Attention has the tag of random operations too, but the CPU's kernel draws none, and other devices draw quickly.
    """
    if not has_tag(target, torch.Tag.nondeterministic_seeded):
        return 0
    if any(argument.name == "dropout_p" for argument in target._schema.arguments):
        return 0
    values = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
    return _shape(values[-1]).numel() if values else 0  # of several results the mask; never a generator state


def _shape(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return tree_map(_shape, value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        return torch.Size(torch_private.size_hint(size) for size in value.shape)
    if isinstance(value, torch.SymInt):
        return torch_private.size_hint(value)
    return value
