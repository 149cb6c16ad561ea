"""Recorded values: replace the strides that a graph records, and those that follow from them.

Nodes are visited in topological order. A *changed* operand is one whose recorded value was replaced before::

    node                       changed operands   its recorded value becomes
    getitem                    any                the item of the changed tuple
    no PyTorch operator        any                as before: it gets copies of the operands in their old order
    view                       any                what its fake kernel returns now; if that fails, it gets copies
    other operator             none               as the caller knows better, or as before
    other operator             any                the same; if it cannot be run, what its fake kernel returns now

Nothing else is copied, since a copy would change the order in which sums traverse memory, and thereby their bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.analysis.fake_results import memory_order, result_tensors, run_fake_kernel, same_dimension_order
from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call
from roundpipe_fx.ir.joint_graph import JointGraph, input_nodes, is_tensor, storages, tensor_values, viewed
from roundpipe_fx.torch_private import tree_map_only

aten = torch.ops.aten


class RecordedValues:
    """The values that a graph records, and which of them were replaced.

    Args:
        joint: the graph.
        correct: gives the tensors that an operator returns, where the caller knows better than its fake kernel; called
            with the node, and with whether operands of it were changed.
    """

    def __init__(
        self, joint: JointGraph, correct: Callable[[fx.Node, bool], Sequence[torch.Tensor] | None] = lambda *_: None
    ) -> None:
        self._joint = joint
        self._correct = correct
        self._before: dict[fx.Node, Any] = {}
        """The old value of each node whose recorded value was replaced."""
        self._bases: dict[fx.Node, fx.Node] | None = None
        """The bases of views. Views are recognized by their storages, so this is read before a value is replaced."""
        self._restored: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Correct a node's recorded value, those of all nodes before it being correct."""
        if not tensor_values(node):
            return
        changed = [source for source in input_nodes(node) if source in self._before]
        # The cases of the table in the docstring.
        if node.target is operator.getitem:
            for source in changed:
                self.replace(node, source.meta["val"][node.args[1]])
        elif not isinstance(node.target, torch._ops.OpOverload):
            for source in changed:
                self.restore(node, source)
        elif self._shares(node):
            if changed:
                self._visit_view(node, changed)
        else:
            self._visit_computed(node, changed)

    def replace(self, node: fx.Node, value: Any) -> None:
        """Replace the recorded value of a node."""
        # Bases are noted before the first change, while recorded values still tell who shares memory.
        if self._bases is None:
            self._bases = {other: viewed(other) for other in self._joint.computed() if _shares_storage(other)}
        self._before.setdefault(node, node.meta["val"])
        node.meta["val"] = value

    def recompute(self, node: fx.Node) -> bool:
        """Record what a node's fake kernel returns for its operands; return whether it accepts them."""
        result = run_fake_kernel(node)
        if result is None:
            return False
        recorded, values = tensor_values(node), result_tensors(result)
        # The fake kernel's result only counts if it has the shapes that were recorded.
        if [value.shape for value in values] == [value.shape for value in recorded]:
            pairs = zip(recorded, values, strict=True)
            # An unchanged layout keeps the recorded value, so that nothing behind it is visited.
            self._record(node, [old if layout_of(old) == layout_of(new) else new for old, new in pairs])
        return True

    def restore(self, node: fx.Node, source: fx.Node) -> None:
        """Give a node a copy of an operand in the old order, if it was changed and is not in that order anyway."""
        if source in self._before and is_tensor(source) and not self._keeps_order(source):
            node.replace_input_with(source, self._copy(source))

    def _shares(self, node: fx.Node) -> bool:
        """Return whether a node's value is a view, or shares a storage with an operand otherwise."""
        if self._bases is not None:
            return node in self._bases
        return _shares_storage(node)

    def _visit_view(self, node: fx.Node, changed: Sequence[fx.Node]) -> None:
        # `as_strided` reads addresses, so it has to read the base in its old order.
        if node.target is aten.as_strided.default and not self._keeps_order(changed[0]):
            # It reads the base's memory by address: only the base in its old order has the same elements there.
            assert self._bases is not None
            base = self._bases[node]
            if base in self._before:
                node.replace_input_with(changed[0], self._copy(base))
                return
        value = run_fake_kernel(node)
        if value is None:
            for source in changed:
                self.restore(node, source)
            value = run_fake_kernel(node)
            assert value is not None, f"{node.format_node()} fails on the values that were recorded"
        self.replace(node, value)

    def _visit_computed(self, node: fx.Node, changed: Sequence[fx.Node]) -> None:
        values = self._correct(node, bool(changed))
        if values is not None:
            self._record(node, values)
        elif changed and not self.recompute(node):
            for source in changed:
                self.restore(node, source)

    def _record(self, node: fx.Node, values: Sequence[torch.Tensor]) -> None:
        """Replace the tensors that a node records, if any differs."""
        if any(old is not new for old, new in zip(tensor_values(node), values, strict=True)):
            following = iter(values)
            self.replace(node, tree_map_only(torch.Tensor, lambda _: next(following), node.meta["val"]))

    def _keeps_order(self, node: fx.Node) -> bool:
        """Return whether the new value of a node has its dimensions in the old order."""
        return same_dimension_order(self._before[node], node.meta["val"])

    def _copy(self, node: fx.Node) -> fx.Node:
        """A copy of a value in its old order; all users share it."""
        if node not in self._restored:
            self._restored[node] = copy_in_order(node, self._before[node])
        return self._restored[node]


def _shares_storage(node: fx.Node) -> bool:
    operand_storages = {storage for source in input_nodes(node) for storage in storages(source)}
    return node.target is not operator.getitem and not operand_storages.isdisjoint(storages(node))


def copy_in_order(node: fx.Node, example: torch.Tensor) -> fx.Node:
    """Insert a copy of a node's value without gaps, with its dimensions in the order of ``example``."""
    order = memory_order(example)
    following = node.next
    turned = insert_call(following, aten.permute.default, node, order)
    copied = insert_call(following, aten.clone.default, turned, memory_format=torch.contiguous_format)
    restored = insert_call(following, aten.permute.default, copied, [order.index(dim) for dim in range(len(order))])
    for added in (turned, copied, restored):
        inherit_origin(added, node)
    return restored
