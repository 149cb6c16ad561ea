"""The interface of a cost model, and costs of a node: bytes of new storage, operations, modelled seconds."""

from __future__ import annotations

import operator
from typing import Protocol

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from roundpipe_fx.analysis.cost.roofline import count_flops
from roundpipe_fx.ir.joint_graph import Mark, input_nodes, is_view, storages, tensor_values
from roundpipe_fx.operators.gradient_sums import SUMMING
from roundpipe_fx.torch_private import size_hint


class CostModel(Protocol):
    """Seconds of operations and transfers on one device."""

    @property
    def overhead(self) -> float:
        """Seconds of an operation that are independent of its size."""

    @property
    def launch(self) -> float:
        """Seconds in which the host launches an operation while the device works; 0 if it runs where it is called."""

    @property
    def rates(self) -> str:
        """The table that the seconds are from."""

    @property
    def host(self) -> float:
        """Bytes per second between the device and the host, in one direction at a time."""

    @property
    def both_ways(self) -> float:
        """The share of ``host`` that each direction has while both are busy."""

    def seconds(self, flops: int, traffic: int, dtype: torch.dtype = ...) -> float:
        """Modelled seconds of ``flops`` floating-point operations that read and write ``traffic`` bytes."""

    def node_seconds(self, node: fx.Node, flops: int, traffic: int, dtype: torch.dtype) -> float:
        """Seconds of a node's operation, which has ``flops`` floating-point operations and moves ``traffic`` bytes."""

    def transfer_seconds(self, size: int) -> float:
        """Modelled seconds of sending ``size`` bytes to another device."""


def annotate_node(node: fx.Node, costs: CostModel) -> None:
    """Annotate a node with the bytes that it allocates, its flops and its seconds."""
    inherited = {storage for source in input_nodes(node) for storage in storages(source)}
    results = storages(node)
    is_sum = node.target in SUMMING  # it writes over its first argument, which it reads as well
    if not is_sum and (is_view(node) if node.target is operator.getitem else results and inherited.issuperset(results)):
        new_bytes, flops, seconds = 0, 0, 0.0
    else:
        values = tensor_values(node)
        new_bytes = tensor_bytes(values, exclude=inherited)
        flops = count_flops(node)
        read = sum(tensor_bytes(tensor_values(source)) for source in input_nodes(node))
        dtype = values[0].dtype if values else torch.float32
        written = tensor_bytes(values) if is_sum else new_bytes
        tuple_item = not values or (inherited.issuperset(results) and not is_sum)
        seconds = 0.0 if tuple_item else costs.node_seconds(node, flops, read + written, dtype)
    if not new_bytes:  # copied together with another node's annotations
        node.meta.pop(Mark.WORKSPACE, None)
        node.meta.pop(Mark.UNTRIED, None)
    node.meta[Mark.BYTES] = new_bytes
    node.meta[Mark.FLOPS] = flops
    node.meta[Mark.SECONDS] = seconds


def tensor_bytes(values: list[torch.Tensor], exclude: set[int] | None = None) -> int:
    """Bytes of the storages of ``values``, each storage once, without those in ``exclude``."""
    seen = set(exclude or ())
    total = 0
    for value in values:
        if value.layout is not torch.strided:
            total += _other_bytes(value)
            continue
        storage = value.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        total += size_hint(storage.nbytes())
    return total


def dense_bytes(value: torch.Tensor) -> int:
    """Bytes of a tensor of the same numbers with memory of its own: of an expanded one, more than its storage has."""
    if value.layout is not torch.strided:
        return _other_bytes(value)
    return max(size_hint(value.untyped_storage().nbytes()), size_hint(value.numel()) * value.dtype.itemsize)


_noted_bytes = WeakTensorKeyDictionary()
"""Bytes of fake tensors that are not strided, as they were seen; an entry goes when its tensor does."""


def note_bytes(value: torch.Tensor, size: int) -> None:
    """Record the bytes of a fake tensor that is not strided; otherwise it counts as a dense one."""
    _noted_bytes[value] = size


def _other_bytes(value: torch.Tensor) -> int:
    noted: int | None = _noted_bytes.get(value)
    if noted is not None:
        return noted
    count = 1
    for size in value.shape:
        count *= size_hint(size)
    return count * value.dtype.itemsize
