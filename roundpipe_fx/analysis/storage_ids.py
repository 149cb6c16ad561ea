"""Storage ids: the storages behind an FX node's value, followed through views, tuples and in-place writes.

Fake tensors have storages, but a copy of a node has the fake tensors of its original; so aliases are determined from
the nodes that a node reads, and each node that computes gets new storages.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import dense_bytes, tensor_bytes
from roundpipe_fx.ir.joint_graph import input_nodes, tensor_values
from roundpipe_fx.operators.gradient_sums import SUMMING, add_to
from roundpipe_fx.operators.partial_writes import PARTIAL_WRITES

OUTSIDE = -1
"""Stands for the storage of values that are not counted: parameters, the user's inputs."""


class StorageIds:
    """Numbers the storages of nodes, which are visited in order.

    Args:
        granularity: bytes that the device's allocator rounds sizes up to.
    """

    def __init__(self, granularity: int = 1) -> None:
        self._granularity = granularity
        self._leaves: dict[fx.Node, list[int]] = {}
        self.sizes: list[int] = []

    def get(self, node: fx.Node) -> list[int]:
        """Storages of a node's tensors, in order; ``OUTSIDE`` for those that are not counted."""
        return self._leaves.get(node, [])

    def assign(self, node: fx.Node, storages: list[int]) -> None:
        """Set the storages of a graph input; none for an accumulated gradient that does not exist yet."""
        self._leaves[node] = storages

    def allocate(self, value: torch.Tensor) -> int:
        """Number a new storage, of the size of a tensor's storage."""
        return self.allocate_bytes(tensor_bytes([value]))

    def allocate_bytes(self, size: int) -> int:
        """Number a new storage of ``size`` bytes."""
        # Rounded up to the allocator's granularity: 1000 bytes are 1024 on CUDA.
        self.sizes.append(-(-size // self._granularity) * self._granularity)
        return len(self.sizes) - 1

    def allocate_tangent(self, value: torch.Tensor, expected: bool) -> int:
        """Number a new storage for an incoming gradient; one that is not expected is an expanded scalar zero."""
        # A gradient that the caller is not expected to give is an expanded zero: one element, whatever its shape.
        return self.allocate_bytes(dense_bytes(value) if expected else value.dtype.itemsize)

    def reads(self, node: fx.Node) -> list[int]:
        """Storages that a node reads, each once."""
        return list(dict.fromkeys(s for source in input_nodes(node) for s in self.get(source) if s != OUTSIDE))

    def follow(self, node: fx.Node) -> list[int]:
        """Number the storages of a node; returns those that it allocates."""
        if node.target is operator.getitem:
            self._leaves[node] = self._item(node)
            return []
        # A sum is written in place once it exists; the first addition takes over its operand's memory.
        if node.target in SUMMING and (node.target is add_to or self.get(_total(node))):
            self._leaves[node] = self.get(_total(node)) or self.get(node.all_input_nodes[-1])
            return []
        values = tensor_values(node)
        written = _written(node)
        # An operation that writes into an operand makes no storage; its result is that operand.
        if written is not None:
            self._leaves[node] = list(self.get(written))
            return []
        # Fake tensors of operands and results tell which share storages, within this node.
        storage_of: dict[int, int] = {}
        for source in input_nodes(node):
            for value, storage in zip(tensor_values(source), self.get(source), strict=False):
                if value.layout is torch.strided:
                    storage_of.setdefault(value.untyped_storage()._cdata, storage)
        leaves: list[int] = []
        allocated: list[int] = []
        for value in values:
            key = value.untyped_storage()._cdata if value.layout is torch.strided else None
            if key is not None and key in storage_of:
                storage = storage_of[key]
            else:
                storage = self.allocate(value)
                allocated.append(storage)
                if key is not None:
                    storage_of[key] = storage
            leaves.append(storage)
        self._leaves[node] = leaves
        return allocated

    def _item(self, node: fx.Node) -> list[int]:
        source, index = node.args
        assert isinstance(source, fx.Node)
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) or not isinstance(index, int):
            return self.get(source)
        assert value is not None
        # Items of tuples: the storages are one flat list, so those of earlier items are skipped.
        before = sum(_count_tensors(item) for item in value[:index])
        return self.get(source)[before : before + _count_tensors(value[index])]


def _total(node: fx.Node) -> fx.Node:
    total = node.args[0]
    assert isinstance(total, fx.Node)
    return total


def _written(node: fx.Node) -> fx.Node | None:
    """The argument that a node writes its result into; ``None`` if it allocates its result."""
    if node.target in _WRITING_FIRST:
        return node.all_input_nodes[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    written = _written_argument(node.target)
    if written is None:
        return None
    position, name = written
    argument: Any = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
    return argument if isinstance(argument, fx.Node) else None


_WRITING_FIRST = frozenset(PARTIAL_WRITES.values())


@functools.cache
def _written_argument(target: torch._ops.OpOverload) -> tuple[int, str] | None:
    """Position and name of the argument that an operator writes into; ``None``: there is none."""
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return position, argument.name
    return None


def _count_tensors(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return 1
    return sum(_count_tensors(item) for item in value) if isinstance(value, (tuple, list)) else 0
