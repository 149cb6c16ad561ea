"""row_slices: a slice of rows of a wide value becomes one of the narrow values that it is made of.

So the logits of ``logits[:, :-1]`` are made without those of last tokens, and a tile region forms around them; its
backward works on the same rows, and zeros are put where rows were left out when it is narrow again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import CostModel, annotate_added, note_real_values
from roundpipe_fx.analysis.tiling import RowSlice, find_row_slice
from roundpipe_fx.ir.graph_edit import inherit_origin
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, is_view, tensor_values

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def slice_narrow_values(
    joint: JointGraph,
    costs: CostModel,
    device: torch.device | None = None,
    eager: bool = True,
    present: bool = True,
) -> JointGraph:
    """Slice narrow values instead of wide ones that are made of them row by row.

    Args:
        joint: an annotated graph; it is rewritten.
        costs: of what is added.
        device: where it runs; ``None``: not known, as are workspaces.
        eager: whether it runs as it is.
        present: whether the device is there.
    """
    changed: set[fx.Node] = set()
    for node in joint.in_phase(Phase.FORWARD):
        row_slice = find_row_slice(joint, node)
        if row_slice is not None:
            changed |= _Edit(row_slice, device if eager and present else None).made
    annotate_added([node for node in joint.computed() if node in changed], costs, device, eager, present)
    return joint


class _Edit:
    """One slice is moved.

    Args:
        found: the slice, and what leaves out rows.
        device: where operations run as they are; ``None``: they do not, or it is not present.

    Attributes:
        made: operations that were added, or do something else than before.
    """

    def __init__(self, row_slice: RowSlice, device: torch.device | None) -> None:
        self.row_slice, self.device = row_slice, device
        self.graph = row_slice.node.graph
        self.made: set[fx.Node] = set()
        # Once the first is changed, shapes no longer tell what the others do.
        planned = [(member, *row_slice.arguments(member)) for member in row_slice.members]
        sliced = {gradient: gradient.args[0] for gradient in row_slice.gradients}
        self._split_of = {value: row_slice.split(value) for value in (*row_slice.narrow, *row_slice.padded)}
        self._shape_of = {value: list(value.meta["val"].shape) for value in row_slice.padded}
        moved: set[fx.Node] = set()
        # Members get their sliced operands; where narrow operands are sliced, everything wide behind them has fewer
        # rows.
        for member, args, kwargs in planned:
            for source in member.all_input_nodes:
                if source in row_slice.narrow and source not in sliced:
                    sliced[source] = self._sliced(source, member)
            member.args, member.kwargs = fx.map_arg((args, kwargs), lambda source: sliced.get(source, source))
            self._value(member)
            self.made.add(member)
        # Readers outside get the rows that were left out, as zeros.
        for value in row_slice.padded:
            moved.add(self._padded(value))
        assert isinstance(row_slice.node.args[0], fx.Node)
        source = row_slice.node.args[0]
        # The slice itself has nothing left to do.
        row_slice.node.replace_all_uses_with(source)
        moved.add(source)
        for node in (row_slice.node, *row_slice.gradients):
            self.graph.erase_node(node)
        self._follow(moved)

    def _sliced(self, value: fx.Node, reader: fx.Node) -> fx.Node:
        """A narrow value on the rows that are kept."""
        dim, before, behind = self._split_of[value]
        shape = list(value.meta["val"].shape)
        late = value.meta.get(Mark.PHASE) is Phase.BACKWARD or str(value.target).startswith("tangents")
        phase = Phase.BACKWARD if late else Phase.FORWARD
        parts = _parts(shape[dim], before, behind)
        with self.graph.inserting_before(reader):
            apart = self._viewed(value, [*shape[:dim], *parts, *shape[dim + 1 :]], value, phase)
            dim += before > 1
            kept = self._call(value, phase, aten.slice.Tensor, apart, dim, *self.row_slice.node.args[2:])
            whole = self._call(value, phase, aten.clone.default, kept, memory_format=torch.contiguous_format)
            return self._viewed(whole, self._kept(shape, value), value, phase)

    def _kept(self, shape: Sequence[int], value: fx.Node) -> list[int]:
        dim, before, behind = self._split_of[value]
        return [*shape[:dim], before * self.row_slice.kept * behind, *shape[dim + 1 :]]

    def _padded(self, value: fx.Node) -> fx.Node:
        """A narrow value with zeros in rows that were left out, for others to read."""
        dim, before, behind = self._split_of[value]
        shape, phase = self._shape_of[value], Phase.BACKWARD
        readers = [user for user in value.users if user not in self.row_slice.members]
        parts = _parts(self.row_slice.kept * before * behind, before, behind)
        whole = [*shape[:dim], *_parts(shape[dim], before, behind), *shape[dim + 1 :]]
        known = self.row_slice.node.args[2:]
        bounds: list[Any] = [*known, *(None, None, 1)[len(known) :]]  # start, end, step
        with self.graph.inserting_before(value.next):
            apart = self._viewed(value, [*shape[:dim], *parts, *shape[dim + 1 :]], value, phase)
            dim += before > 1
            zeros = self._call(value, phase, aten.slice_backward.default, apart, whole, dim, *bounds)
            padded = self._viewed(zeros, shape, value, phase)
        for reader in readers:
            reader.replace_input_with(value, padded)
        return padded

    def _viewed(self, value: fx.Node, shape: Sequence[int], original: fx.Node, phase: Phase) -> fx.Node:
        if list(value.meta["val"].shape) == list(shape):
            return value
        return self._call(original, phase, aten.view.default, value, list(shape))

    def _call(self, original: fx.Node, phase: Phase, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add an operation where the graph inserts."""
        call = self.graph.call_function(target, args, kwargs)
        inherit_origin(call, original)
        call.meta[Mark.PHASE] = phase
        self._value(call)
        self.made.add(call)
        return call

    def _value(self, node: fx.Node) -> None:
        """Recompute a fake value."""
        if node.target is operator.getitem:
            source, item = node.args
            node.meta["val"] = source.meta["val"][item]  # type: ignore[union-attr]
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        mode = next(value.fake_mode for source in node.all_input_nodes for value in tensor_values(source))  # type: ignore[attr-defined]
        with mode:
            try:
                node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
            except (RuntimeError, ValueError):
                if node.target not in _VIEWS:
                    raise
                node.target = aten.reshape.default  # rows that are kept are not evenly apart in memory
                node.meta["val"] = node.target(*args, **kwargs)
        if self.device is not None:
            note_real_values(node, self.device)

    def _follow(self, moved: set[fx.Node]) -> None:
        """Recompute fake values where something is read that lies otherwise in memory, or elsewhere."""
        for node in self.graph.nodes:
            if node.op != "call_function" or node in self.made or moved.isdisjoint(node.all_input_nodes):
                continue
            before, was_view = node.meta["val"], is_view(node)
            self._value(node)
            if was_view or is_view(node) or _strides(before) != _strides(node.meta["val"]):
                moved.add(node)
                self.made.add(node)
            else:
                node.meta["val"] = before


def _parts(size: int, before: int, behind: int) -> list[int]:
    """A size as the product of what is before, along and behind the sliced dimension."""
    sizes = (before, size // (before * behind), behind)
    return [part for position, part in enumerate(sizes) if part > 1 or position == 1]


def _strides(value: Any) -> list[tuple[int, ...]]:
    values: Iterable[Any] = value if isinstance(value, (list, tuple)) else [value]
    return [tuple(tensor.stride()) for tensor in values if isinstance(tensor, torch.Tensor)]
