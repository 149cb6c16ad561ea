"""The roofline model: an operation takes the longer of its arithmetic time and its memory time.

::

    seconds = max(flops / peak of its dtype, bytes read and written / bandwidth) + overhead + draws · seconds of a draw

    at 100 TFLOPS and 1 TB/s            flops        bytes       arithmetic    memory     without overhead
    [4096, 4096] · [4096, 4096], bf16   137.4e9      100.7e6     1.374 ms      0.101 ms   1.374 ms
    their sum                           0            100.7e6     0             0.101 ms   0.101 ms

Deterministic on purpose — the same graph always gets the same cost, so plans and golden files are stable. Williams,
Waterman, Patterson, "Roofline: an insightful visual performance model", 2009. Flop counts are PyTorch's own
(``torch.utils.flop_counter``), except for causal attention, all of whose scores it counts. Random numbers are added:
the CPU's generator draws sequentially, whatever the number of threads (measured by ``benchmarks/drawing.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from roundpipe_fx import torch_private
from roundpipe_fx.analysis.cost.device_rates import ARCHITECTURES, Peaks, Shares
from roundpipe_fx.analysis.cost.network import Network, collective_seconds, make_usual_network
from roundpipe_fx.ir.collectives import is_collective
from roundpipe_fx.ir.decisions import CPU_RATES
from roundpipe_fx.ir.joint_graph import has_tag
from roundpipe_fx.operators.gradient_sums import add_product_to
from roundpipe_fx.torch_private import tree_leaves, tree_map

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The rates that a device attains.

    A GPU runs a queue of kernels, which the host fills meanwhile: launches take time only where the queue is empty. So
    they are no part of an operation's seconds, but the least that many operations take together::

        host     launch launch launch launch launch ┄
        device          [  product   ] [add] [ product ]   the longer row is how long a stage takes

    Attributes:
        name: name of the device.
        flops: attained floating-point operations per second, by dtype; other dtypes count as ``torch.float32``.
        bandwidth: attained bytes per second of the device's memory.
        link: bytes per second from this device to another one.
        host: bytes per second between this device and the host, in one direction at a time.
        both_ways: share of ``host`` that each direction has while both are busy.
        overhead: seconds that an operation takes on the device, independent of its size; on the CPU with its launch.
        network: the usual links between such devices, of one node or many.
        rates: the table that the rates are from, for those who read modelled seconds.
        memory: bytes of memory of the device; 0 if it is not fixed.
        draw: seconds of drawing a random number, in addition to writing it.
        full: number of elements of a result from which on a kernel keeps the whole device busy.
        launch: seconds in which the host launches an operation while the device works on earlier ones; 0 if operations
            run where they are called.
        attention_forward: operations per second of attention kernels, by dtype; where absent those of products.
        attention_backward: likewise, of their backward.
    """

    name: str
    flops: Mapping[torch.dtype, float] = field(hash=False)
    bandwidth: float
    link: float
    host: float
    overhead: float
    network: Network
    rates: str
    memory: int = 0
    draw: float = 0.0
    full: int = 1 << 15
    """ATen's grain size: with fewer elements a kernel runs on one thread of the CPU (``ATen/Parallel.h``)."""
    launch: float = 0.0
    both_ways: float = 1.0
    attention_forward: Mapping[torch.dtype, float] = field(default_factory=dict, hash=False)
    attention_backward: Mapping[torch.dtype, float] = field(default_factory=dict, hash=False)

    def node_seconds(self, node: fx.Node, flops: int, traffic: int, dtype: torch.dtype) -> float:
        """Modelled seconds of a node's operation."""
        if is_collective(node.target):
            # `None`: an operator without a known volume is costed by the bytes that it reads and writes.
            sent = collective_seconds(node, self.network)
            if sent is not None:
                return sent
        packet = getattr(node.target, "overloadpacket", None)
        for attention, rates in ((_ATTENTION, self.attention_forward), (_ATTENTION_BACKWARDS, self.attention_backward)):
            if packet in attention and dtype in rates:
                # Expressed in operations of products: half the rate is twice as many.
                flops = round(flops * self.flops[dtype] / rates[dtype])
        # Lookups read the rows that are asked for, and not the table; the loss reads one score of each row.
        if self.launch and packet in _UNREAD:
            operand = node.args[_UNREAD[packet]]
            # A lookup reads as many bytes as it writes.
            traffic -= _bytes_of(operand) if isinstance(operand, fx.Node) else 0
            traffic += _bytes_of(node) if packet in _ROWS_READ else 0
        operators = [node.target, *(argument for argument in node.args if isinstance(argument, torch._ops.OpOverload))]
        return self.seconds(flops, traffic, dtype, numbers_drawn(operators[-1], node.meta.get("val")))

    def seconds(self, flops: int, traffic: int, dtype: torch.dtype = torch.float32, draws: int = 0) -> float:
        """Modelled seconds of an operation with ``flops``, ``traffic`` in bytes, and ``draws`` random numbers."""
        peak = self.flops.get(dtype, self.flops[torch.float32])
        # The longer of computing and moving bytes, which overlap; the generator's numbers and the overhead come on top.
        return max(flops / peak, traffic / self.bandwidth) + draws * self.draw + self.overhead

    def transfer_seconds(self, size: int) -> float:
        """Modelled seconds of sending ``size`` bytes to another device."""
        return size / self.link


_ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    }
)
_ATTENTION_BACKWARDS = frozenset(
    {
        aten._scaled_dot_product_flash_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        aten._scaled_dot_product_efficient_attention_backward,
        aten._scaled_dot_product_cudnn_attention_backward,
    }
)
_ROWS_READ = frozenset({aten.embedding, aten.gather, aten.index_select})
"""Operators that read as much of an operand as they write."""
_UNREAD = {**dict.fromkeys(_ROWS_READ, 0), aten.nll_loss_forward: 0, aten.nll_loss_backward: 1}
"""Operators that do not read an operand but for what indices name, and its position. The CPU's plans count all of it,
as they always did."""

_RESIDENT_ELEMENTS = 1 << 20
"""About a hundred multiprocessors with 2,048 threads, each of which computes some four elements."""


def _bytes_of(node: fx.Node) -> int:
    values = [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]
    return sum(int(_shape(value).numel()) * value.dtype.itemsize for value in values)


def _gpu(name: str, peaks: Peaks, shares: Shares, tf32: bool, half_sums: bool) -> Roofline:
    """A GPU's roofline.

    Args:
        tf32: whether operands of products in float32 are rounded to TF32.
        half_sums: whether products in float16 sum in float16.
    """
    half, single = shares.products.value, shares.float32_products.value
    # Attained rates: shares of the data sheet's peaks that benchmarks reach.
    attained = {
        torch.float32: single * (peaks.tf32 if tf32 else peaks.float32),
        torch.float16: half * (peaks.half_sums if half_sums else peaks.half),
        torch.bfloat16: half * peaks.half,
        torch.float64: single * peaks.float64,
    }
    settings = [text for text, used in (("TF32", tf32), ("sums in float16", half_sums)) if used]
    halves = torch.float16, torch.bfloat16
    return Roofline(
        name=name,
        flops=attained,
        bandwidth=shares.memory.value * peaks.memory,
        link=peaks.link,
        host=shares.host.value * peaks.host,
        overhead=shares.kernel_seconds.value,
        network=make_usual_network(peaks.link, peaks.link > _PCIE, peaks.between),
        rates=", ".join([f"table of the {name}", *settings]),
        memory=peaks.gib * 2**30,
        full=_RESIDENT_ELEMENTS,
        launch=shares.launch_seconds.value,
        both_ways=shares.host_both_ways.value,
        attention_forward=dict.fromkeys(halves, shares.attention_forward.value * peaks.half),
        attention_backward=dict.fromkeys(halves, shares.attention_backward.value * peaks.half),
    )


_PCIE = 32e9
_CPU = Roofline(
    name="CPU",
    flops={torch.float32: 1e11, torch.float64: 5e10, torch.bfloat16: 1e11},
    bandwidth=2e10,
    link=2e10,
    host=2e10,
    overhead=2e-6,
    network=make_usual_network(2e10, False, 12.5e9 / 8),
    rates=CPU_RATES,
    draw=5e-9,
)
DEVICES: Mapping[str, Roofline] = {
    "cpu": _CPU,
    **{name: _gpu(name, *known, tf32=False, half_sums=False) for name, known in ARCHITECTURES.items()},
}


def find_roofline(device: torch.device, name: str | None = None) -> Roofline:
    """Find the roofline of a device: by its reported name if that is in the table, else a typical one.

    Products are those of PyTorch's settings: ``torch.backends.cuda.matmul.fp32_precision`` and
    ``torch.backends.cuda.matmul.allow_fp16_accumulation``.

    Args:
        device: the device.
        name: name of a device in the table to model instead of ``device``.
    """
    reported = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""
    if name is None:
        architecture = next((known for known in ARCHITECTURES if known in reported), "A100")
        name = "cpu" if device.type in ("cpu", "meta") else architecture
        reported = "" if name in reported else reported
    else:
        reported = ""
    roofline = DEVICES[name]
    matmul = torch.backends.cuda.matmul
    tf32, half_sums = matmul.fp32_precision == "tf32", matmul.allow_fp16_accumulation
    if name in ARCHITECTURES and (tf32 or half_sums):
        other = _gpu(name, *ARCHITECTURES[name], tf32=tf32, half_sums=half_sums)
        roofline = replace(roofline, flops=other.flops, rates=other.rates)
    if reported and name in ARCHITECTURES:
        roofline = replace(roofline, rates=f"{roofline.rates}, which the {reported} is taken to be like")
    return roofline


# What PyTorch's flop counter does not know, with what takes the same arguments: the CPU's attention, sums of products.
_SAME_FLOPS: Mapping[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    add_product_to: aten.addmm,
}


def count_flops(node: fx.Node) -> int:
    """Floating-point operations of an FX node, 0 where PyTorch's flop counter has no formula (pointwise, views)."""
    return count_call_flops(node.target, node.args, node.kwargs, node.meta.get("val"))


def count_call_flops(target: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of an operator's call; operands may be nodes or tensors."""
    packet = getattr(target, "overloadpacket", target)
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs, out = tree_map(_shape, (args, kwargs, result))
    # PyTorch counts all scores, and with a causal mask only those below the diagonal are computed.
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
    # A triangle of `seen` rows, and below it rows that see all keys: 4 queries and 2 keys compute 3 + 2·2 = 7 of 8
    # scores.
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
