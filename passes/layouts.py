"""layouts: restore the strides recorded in the graph.

The graph records the strides that fake kernels chose while it was traced, and much depends on them: views (``view``
fails where dimensions are not adjacent, ``as_strided`` reads other elements), operations that write over an operand
(the next kernel traverses memory in its order, which determines rounding), and the operands on which kernels are
measured. For some operators the fake kernel chooses other strides than the real one
(:mod:`roundpipe_fx.analysis.cost.real_layout`).

The pass visits nodes in topological order and replaces the recorded value where the real one differs. A *changed*
operand is one whose recorded value was replaced before::

    node                       changed operands   its recorded value becomes
    getitem                    any                the item of the changed tuple
    no PyTorch operator        any                as before: it gets copies of the operands in their old order
    view                       any                what its fake kernel returns now; if that fails, it gets copies
    other operator             none               what the real kernel returns, where that is not known to agree
    other operator             any                the same; if it cannot be run, what its fake kernel returns now

Nothing else is copied, since a copy would change the order in which sums traverse memory, and thereby their bits; with
one exception. For a dimension of size 1 the real ``view`` returns another stride than its fake kernel. This matters to
group normalization alone, which tells by it whether channels lie innermost, and fails or reads another order. A copy
has the recorded strides.

Memory-efficient attention on CUDA leaves its seed and its offset on the host, and its gradient reads them there. Its
fake kernel says that they are on the device; they are recorded where they are, so nothing moves them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import (
    is_plainly_contiguous,
    layout_of,
    note_sparse_bytes,
    predict_real_values,
    results_on_host,
)
from roundpipe_fx.analysis.fake_results import result_tensors, run_fake_kernel, same_dimension_order
from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call
from roundpipe_fx.ir.joint_graph import JointGraph, has_tag, input_nodes, is_tensor, storages, tensor_values, viewed
from roundpipe_fx.torch_private import tree_map_only

aten = torch.ops.aten


def restore_layouts(joint: JointGraph, device: torch.device | None = None) -> JointGraph:
    """Record the strides that values really have. Runs before annotate.

    Args:
        joint: the graph; it is rewritten.
        device: where kernels run and can be tried; ``None``: it is not present, and only pointwise operators are.

    Returns:
        The same graph.
    """
    values = _RecordedValues(joint, device)
    for node in list(joint.computed()):
        values.visit(node)
    _copy_single_samples(joint)
    return joint


class _RecordedValues:
    """The values that a graph records; those that differ from what kernels return are replaced."""

    def __init__(self, joint: JointGraph, device: torch.device | None) -> None:
        self._joint = joint
        self._device = device
        self._plain: dict[fx.Node, bool] = {}
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
        # Four cases, in the order of the table in the docstring.
        if node.target is operator.getitem:
            for source in changed:
                self._replace(node, source.meta["val"][node.args[1]])
        elif not isinstance(node.target, torch._ops.OpOverload):
            for source in changed:
                self._restore(node, source)
        elif self._shares(node):
            if changed:
                self._visit_view(node, changed)
        elif changed or not (self._is_simple(node) and all(map(self._is_plain, input_nodes(node)))):
            self._visit_computed(node, changed)
        if results_on_host(node.target):
            self._record_on_host(node, results_on_host(node.target))
        if any(value.layout is not torch.strided for value in tensor_values(node)):
            note_sparse_bytes(node, self._device)

    def _record_on_host(self, node: fx.Node, positions: Sequence[int]) -> None:
        """Record that results are on the host: single numbers."""
        # Seeds of attention: recorded where the kernel leaves them.
        values = list(node.meta["val"])
        for position in positions:
            with values[position].fake_mode:
                values[position] = torch.empty((), dtype=values[position].dtype, device="cpu")
        self._replace(node, tuple(values))

    def _is_simple(self, node: fx.Node) -> bool:
        """Return whether results of contiguous operands are contiguous too, in storages of their own size."""
        return self._device is None or (is_tensor(node) and has_tag(node.target, torch.Tag.pointwise))

    def _is_plain(self, node: fx.Node) -> bool:
        if node not in self._plain:
            self._plain[node] = all(map(is_plainly_contiguous, tensor_values(node)))
        return self._plain[node]

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
                self._restore(node, source)
            value = run_fake_kernel(node)
            assert value is not None, f"{node.format_node()} fails on the values that were recorded"
        self._replace(node, value)

    def _visit_computed(self, node: fx.Node, changed: Sequence[fx.Node]) -> None:
        recorded = tensor_values(node)
        values = predict_real_values(node, self._device) if node.target.namespace == "aten" else None  # type: ignore[union-attr]
        if values is None and changed:
            result = run_fake_kernel(node)
            if result is None:
                for source in changed:
                    self._restore(node, source)
                return
            # The fake kernel's result only counts if it has the shapes that were recorded.
            values = result_tensors(result)
            if [value.shape for value in values] != [value.shape for value in recorded]:
                return
            pairs = zip(recorded, values, strict=True)
            # An unchanged layout keeps the recorded value, so that nothing behind it is visited.
            values = [old if layout_of(old) == layout_of(new) else new for old, new in pairs]
        if values is None or all(old is new for old, new in zip(recorded, values, strict=True)):
            return
        following = iter(values)
        self._replace(node, tree_map_only(torch.Tensor, lambda _: next(following), node.meta["val"]))

    def _replace(self, node: fx.Node, value: Any) -> None:
        # Bases are noted before the first change, while recorded values still tell who shares memory.
        if self._bases is None:
            self._bases = {other: viewed(other) for other in self._joint.computed() if _shares_storage(other)}
        self._before[node] = node.meta["val"]
        self._plain.pop(node, None)
        node.meta["val"] = value

    def _keeps_order(self, node: fx.Node) -> bool:
        """Return whether the new value of a node has its dimensions in the old order."""
        return same_dimension_order(self._before[node], node.meta["val"])

    def _restore(self, node: fx.Node, source: fx.Node) -> None:
        """Give a node a copy of an operand in the old order, unless it is in that order anyway."""
        if is_tensor(source) and not self._keeps_order(source):
            node.replace_input_with(source, self._copy(source))

    def _copy(self, node: fx.Node) -> fx.Node:
        """A copy of a value in its old order; all users share it."""
        if node not in self._restored:
            self._restored[node] = _copied(node, self._before[node])
        return self._restored[node]


_NORMALIZED: dict[Any, int] = {aten.native_group_norm.default: 0, aten.native_group_norm_backward.default: 1}
"""Position of the input."""


def _copy_single_samples(joint: JointGraph) -> None:
    """Give group normalization copies of computed inputs of batch size 1 whose channels lie innermost."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(joint.computed()):
        position = _NORMALIZED.get(node.target)
        source = node.args[position] if position is not None else None
        if not isinstance(source, fx.Node) or source.op == "placeholder" or not _is_single_sample(source.meta["val"]):
            continue
        # One copy for forward and backward.
        if source not in copies:
            form = torch.channels_last if source.meta["val"].dim() == 4 else torch.channels_last_3d
            copies[source] = insert_call(source.next, aten.clone.default, source, memory_format=form)
            inherit_origin(copies[source], source)
        node.replace_input_with(source, copies[source])


def _is_single_sample(value: torch.Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    if form is None or value.shape[0] != 1:
        return False
    return value.is_contiguous(memory_format=form) and not value.is_contiguous()


def _shares_storage(node: fx.Node) -> bool:
    operand_storages = {storage for source in input_nodes(node) for storage in storages(source)}
    return node.target is not operator.getitem and not operand_storages.isdisjoint(storages(node))


def _copied(node: fx.Node, example: torch.Tensor) -> fx.Node:
    """A copy of a node's value without gaps, with its dimensions in the order of ``example``."""
    sizes, strides = layout_of(example)
    # Outermost dimension first; dimensions of size 1 have no order.
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim] if sizes[dim] > 1 else 0, dim))
    following = node.next
    turned = insert_call(following, aten.permute.default, node, order)
    copied = insert_call(following, aten.clone.default, turned, memory_format=torch.contiguous_format)
    restored = insert_call(following, aten.permute.default, copied, [order.index(dim) for dim in range(len(sizes))])
    for added in (turned, copied, restored):
        inherit_origin(added, node)
    return restored
