"""layouts: values lie in memory as the graph says.

The graph notes the strides that fake kernels chose while it was traced, and much relies on them: views (``view``
fails where dimensions do not lie together, ``as_strided`` reads other elements), operations that are to write over an
operand (the next kernel goes through memory in its order, and so rounds), and what kernels are measured on. Two things
make real strides differ:

- *Operators whose fake kernel says otherwise than the real one does* (:mod:`roundpipe_fx.analysis.cost.real_layout`).
  The graph is made to note how values really lie, with all that follows from it. Where a view would fail then, or read
  otherwise, it is given a copy in the order that was noted; nowhere else, since a copy would change the order in which
  sums go through memory, and so their bits.
- *Zeros in place of an incoming gradient that nobody made*: one zero that is seen at every place has no order of
  dimensions to hand on. Where results would lie differently for it, the gradient is marked
  (:attr:`roundpipe_fx.ir.joint_graph.Mark.STRIDED`), and its zeros are made in full.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from roundpipe_fx.analysis.cost import layout_of, lies_plainly, note_sparse_bytes, real_values, small_values
from roundpipe_fx.ir.graph_edit import inherit_origin, insert_call
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    has_tag,
    input_nodes,
    is_seeded,
    is_tensor,
    is_view,
    storages,
    tensor_values,
    viewed,
)

__all__ = ["mark_strided_gradients", "restore_layouts"]

aten = torch.ops.aten

log = logging.getLogger(__name__)


def restore_layouts(joint: JointGraph, device: torch.device | None = None) -> JointGraph:
    """Results that lie otherwise than the graph notes are noted as they lie. Runs before annotate.

    Args:
        joint: the graph.
        device: where kernels run, and can be tried; ``None``: it is not at hand, and pointwise operators alone are.
    """
    notes = _Notes(joint, device)
    for node in list(joint.computed()):
        notes.go_on_to(node)
    notes.finish()
    return joint


class _Notes:
    """Goes through a graph and notes how values really lie."""

    def __init__(self, joint: JointGraph, device: torch.device | None) -> None:
        self._joint = joint
        self._device = device
        self._plain: dict[fx.Node, bool] = {}
        self._before: dict[fx.Node, Any] = {}
        """What was noted of values that are noted anew."""
        self._bases: dict[fx.Node, fx.Node] | None = None
        """What views are of; told by storages, so worked out before a value is noted anew."""
        self._restored: dict[fx.Node, fx.Node] = {}

    def go_on_to(self, node: fx.Node) -> None:
        """Note how a node's value lies, those of all before it being noted rightly."""
        if not tensor_values(node):
            return
        changed = [source for source in input_nodes(node) if source in self._before]
        if node.target is operator.getitem:
            for source in changed:
                self._note(node, source.meta["val"][node.args[1]])
        elif not isinstance(node.target, torch._ops.OpOverload):
            for source in changed:
                self._restore(node, source)
        elif self._shares(node):
            if changed:
                self._see_again(node, changed)
        elif changed or not (self._is_simple(node) and all(map(self._lies_plainly, input_nodes(node)))):
            self._try(node, changed)
        if any(value.layout is not torch.strided for value in tensor_values(node)):
            note_sparse_bytes(node, self._device)

    def finish(self) -> None:
        """Let the caller get what it was told of."""
        output = self._joint.graph.output_node()
        for value in dict.fromkeys(self._joint.forward_outputs):
            if value in self._before and not _same_places(self._before[value], value.meta["val"]):
                results = self._joint.outputs
                copy = self._copy(value)
                count = self._joint.num_forward_outputs
                output.args = ([copy if item is value else item for item in results[:count]] + results[count:],)

    def _is_simple(self, node: fx.Node) -> bool:
        """Whether results of operands that lie plainly do so too, in storages of their own size."""
        return self._device is None or (is_tensor(node) and has_tag(node.target, torch.Tag.pointwise))

    def _lies_plainly(self, node: fx.Node) -> bool:
        if node not in self._plain:
            self._plain[node] = all(map(lies_plainly, tensor_values(node)))
        return self._plain[node]

    def _shares(self, node: fx.Node) -> bool:
        """Whether a node's value is a view, or shares a storage with an operand otherwise."""
        if self._bases is not None:
            return node in self._bases
        return _shares_storage(node)

    def _see_again(self, node: fx.Node, changed: Sequence[fx.Node]) -> None:
        """Note a view of something that is noted anew."""
        if node.target is aten.as_strided.default and not self._same_places(changed[0]):
            assert self._bases is not None
            base = self._bases[node]
            if base in self._before:
                node.replace_input_with(changed[0], self._copy(base))
                return
        value = _faked(node)
        if value is None:
            for source in changed:
                self._restore(node, source)
            value = _faked(node)
            assert value is not None, f"{node.format_node()} fails on what was noted"
        self._note(node, value)

    def _try(self, node: fx.Node, changed: Sequence[fx.Node]) -> None:
        """Note what an operation that computes makes."""
        noted = tensor_values(node)
        values = real_values(node, self._device) if node.target.namespace == "aten" else None  # type: ignore[union-attr]
        if values is None and changed:
            again = _faked(node)
            if again is None:
                for source in changed:
                    self._restore(node, source)
                return
            values = [value for value in _tensors(again)]
            if [value.shape for value in values] != [value.shape for value in noted]:
                return
            values = [old if layout_of(old) == layout_of(new) else new for old, new in zip(noted, values, strict=True)]
        if values is None or all(old is new for old, new in zip(noted, values, strict=True)):
            return
        found = iter(values)
        self._note(node, tree_map_only(torch.Tensor, lambda _: next(found), node.meta["val"]))

    def _note(self, node: fx.Node, value: Any) -> None:
        if self._bases is None:
            self._bases = {other: viewed(other) for other in self._joint.computed() if _shares_storage(other)}
        self._before[node] = node.meta["val"]
        self._plain.pop(node, None)
        node.meta["val"] = value

    def _same_places(self, node: fx.Node) -> bool:
        return _same_places(self._before[node], node.meta["val"])

    def _restore(self, node: fx.Node, source: fx.Node) -> None:
        """Give a node a copy of an operand that lies as was noted, unless the difference is none in memory."""
        if is_tensor(source) and not self._same_places(source):
            node.replace_input_with(source, self._copy(source))

    def _copy(self, node: fx.Node) -> fx.Node:
        """A copy of a value, in the order that was noted; one for all."""
        if node not in self._restored:
            self._restored[node] = _copied(node, self._before[node])
        return self._restored[node]


def mark_strided_gradients(joint: JointGraph) -> JointGraph:
    """Mark incoming gradients whose strides matter even if they are zeros."""
    returned = {value for value in joint.forward_outputs if isinstance(value, fx.Node)}
    for tangent in joint.tangents:
        like = tangent.meta.get("val")
        if not isinstance(like, torch.Tensor) or like.dim() < 2:
            continue
        with like.fake_mode:  # type: ignore[attr-defined]
            zeros = like.new_zeros(()).expand(like.shape)
        if _strides_matter(tangent, zeros, returned, {}):
            tangent.meta[Mark.STRIDED] = True
    return joint


def _strides_matter(node: fx.Node, value: torch.Tensor, returned: Collection[fx.Node], asked: dict[Any, bool]) -> bool:
    """Whether something fails or reads otherwise if a node has a value that lies otherwise than noted.

    Args:
        node: whose value.
        value: fake, as it would lie.
        returned: what the forward returns: its views are told by their noted strides.
        asked: what was found out before, by node and strides.
    """
    key = node, str(value.stride())
    if key not in asked:
        asked[key] = False  # while it is found out
        asked[key] = node in returned or any(_fails(user, node, value, returned, asked) for user in node.users)
    return asked[key]


def _fails(
    user: fx.Node, node: fx.Node, value: torch.Tensor, returned: Collection[fx.Node], asked: dict[Any, bool]
) -> bool:
    if user.op == "output":
        return False
    if not isinstance(user.target, torch._ops.OpOverload) or user.target is aten.as_strided.default:
        return True
    if not is_view(user) and _is_indifferent(user, node, value):
        return False
    lies = _lying(user, node, value)
    return lies is None or _strides_matter(user, lies, returned, asked)


def _lying(node: fx.Node, source: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
    """A node's value as it would lie if a source had another than is noted; ``None``: it fails, or nothing is known."""
    if not is_tensor(node):
        return None
    tried = _tried(node, source, value)
    if tried is not None:
        return tried
    found = _faked(node, source, value)
    return found if isinstance(found, torch.Tensor) else None


def _is_indifferent(node: fx.Node, source: fx.Node, value: torch.Tensor) -> bool:
    """Whether a node's results lie as noted if it is given another value of a source."""
    tried = _tried(node, source, value)
    if tried is not None:
        return _same_places(node.meta["val"], tried)
    found, expected = _tensors(_faked(node, source, value)), _tensors(node.meta.get("val"))
    return len(found) == len(expected) and all(map(_same_places, expected, found))


def _tried(node: fx.Node, source: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
    if not _can_be_tried(node):
        return None
    values = small_values(node, lambda operand: value if operand is source else operand.meta.get("val"))
    return None if values is None else values[0]


def _faked(node: fx.Node, source: fx.Node | None = None, value: torch.Tensor | None = None) -> Any:
    """A node's fake value, a source's value replaced; ``None`` if it fails."""

    def given(operand: fx.Node) -> Any:
        return value if operand is source else operand.meta.get("val")

    assert isinstance(node.target, torch._ops.OpOverload)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
    with tensor_values(node)[0].fake_mode:  # type: ignore[attr-defined]
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            log.info("%s cannot take a value that lies otherwise: %s", node.target, error)
            return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor)]


def _can_be_tried(node: fx.Node) -> bool:
    """Whether an operator can run on small made-up tensors: PyTorch's own that computes, and draws nothing."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and is_tensor(node)
        and node.meta["val"].layout is torch.strided
        and not is_seeded(node)
        and not is_view(node)
    )


def _shares_storage(node: fx.Node) -> bool:
    of_operands = {storage for source in input_nodes(node) for storage in storages(source)}
    return node.target is not operator.getitem and not of_operands.isdisjoint(storages(node))


def _same_places(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two fake tensors have their dimensions in the same order; those of one element do not count."""
    (sizes, strides), (_, others) = layout_of(left), layout_of(right)
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    return sorted(dims, key=lambda dim: -strides[dim]) == sorted(dims, key=lambda dim: -others[dim])


def _copied(node: fx.Node, noted: torch.Tensor) -> fx.Node:
    """A copy of a node's value without gaps, with its dimensions in the order that was noted."""
    sizes, strides = layout_of(noted)
    wanted = sorted(range(len(sizes)), key=lambda dim: (-strides[dim] if sizes[dim] > 1 else 0, dim))
    following = node.next
    turned = insert_call(following, aten.permute.default, node, wanted)
    copied = insert_call(following, aten.clone.default, turned, memory_format=torch.contiguous_format)
    restored = insert_call(following, aten.permute.default, copied, [wanted.index(dim) for dim in range(len(sizes))])
    for made in (turned, copied, restored):
        inherit_origin(made, node)
    return restored
