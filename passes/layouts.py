"""layouts: values lie in memory as the graph says.

The graph notes the strides that fake kernels chose while it was traced, and views rely on them (``view`` fails where
dimensions do not lie together, ``as_strided`` reads other elements). Two things make real strides differ:

- *Operators whose fake kernel is a decomposition* (``softplus_backward``, ``native_dropout_backward``,
  ``hardswish_backward`` and more): where operands lie differently, it may order the result's dimensions like another
  operand than the real kernel does. Where a view would fail or read otherwise, a copy restores the order. Elsewhere the
  graph is made to note how the value really lies: sums go through memory in its order, so a copy would change bits.
- *Zeros in place of an incoming gradient that nobody made*: one zero that is seen at every place has no order of
  dimensions to hand on. Where results would lie differently for it, the gradient is marked
  (:attr:`roundpipe_fx.joint_graph.Mark.STRIDED`), and its zeros are made in full.

Real strides are found by running an operator on small tensors that lie alike.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from roundpipe_fx.insertion import inherit_origin, insert_call
from roundpipe_fx.joint_graph import JointGraph, Mark, input_nodes, is_seeded, is_tensor, is_view
from roundpipe_fx.torch_private import size_hint, without_modes

__all__ = ["mark_strided_gradients", "restore_layouts"]

aten = torch.ops.aten

log = logging.getLogger(__name__)


class _Likeness(NamedTuple):
    """A small tensor that lies like another."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str


def restore_layouts(joint: JointGraph) -> JointGraph:
    """Results that lie otherwise than the graph notes are noted as they lie, or copied. Runs before annotate."""
    returned = {value for value in joint.forward_outputs if isinstance(value, fx.Node)}
    for node in list(joint.computed()):
        if not _may_lie_otherwise(node):
            continue
        noted, found = _likeness(node.meta["val"]), _kernel_strides(node)
        if found is None or _same_order(noted.sizes, found, noted.strides):
            continue
        wanted = _order(noted.sizes, noted.strides)
        really = _laid_out(node.meta["val"], _order(noted.sizes, found))
        if _strides_matter(node, really, returned, {}):
            _restore(node, really, _order(noted.sizes, found), wanted)
        else:
            _note(node, really)
    return joint


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
    strides = _kernel_strides(node, source, value) if _can_be_tried(node) else None
    if strides is not None:
        noted: torch.Tensor = node.meta["val"]
        return _laid_out(noted, _order(_likeness(noted).sizes, strides))
    found = _faked(node, source, value)
    return found if isinstance(found, torch.Tensor) else None


def _note(node: fx.Node, value: torch.Tensor) -> None:
    """Note how a node's value really lies, and how what follows from it does."""
    noted = node.meta["val"]
    for user in list(node.users):
        if user.op != "output" and is_tensor(user) and (is_view(user) or not _is_indifferent(user, node, value)):
            lies = _lying(user, node, value)
            if lies is not None:
                _note(user, lies)
    assert noted.shape == value.shape
    node.meta["val"] = value


def _is_indifferent(node: fx.Node, source: fx.Node, value: torch.Tensor) -> bool:
    """Whether a node's results lie as noted if it is given another value of a source."""
    strides = _kernel_strides(node, source, value) if _can_be_tried(node) else None
    if strides is not None:
        noted = _likeness(node.meta["val"])
        return _same_order(noted.sizes, strides, noted.strides)
    found, expected = _tensors(_faked(node, source, value)), _tensors(node.meta.get("val"))
    if len(found) != len(expected):
        return False
    pairs = [(_likeness(left), _likeness(right)) for left, right in zip(found, expected, strict=True)]
    return all(_same_order(left.sizes, left.strides, right.strides) for left, right in pairs)


def _faked(node: fx.Node, source: fx.Node, value: torch.Tensor) -> Any:
    """A node's fake value if a source had another than is noted; ``None`` if it cannot be."""

    def given(operand: fx.Node) -> Any:
        return value if operand is source else operand.meta.get("val")

    assert isinstance(node.target, torch._ops.OpOverload)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), given)
    with value.fake_mode:  # type: ignore[attr-defined]
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            log.info("%s cannot take one zero seen at every place: %s", node.target, error)
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


def _may_lie_otherwise(node: fx.Node) -> bool:
    """Not so in the usual case: operands of the result's shape all lie like the result, which every kernel keeps."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.layout is not torch.strided:
        return False
    shape, strides = str(value.shape), str(value.stride())  # as text: comparing symbols would add guards
    operands = [source.meta["val"] for source in input_nodes(node) if is_tensor(source)]
    same = [operand for operand in operands if operand.layout is torch.strided and str(operand.shape) == shape]
    return any(str(operand.stride()) != strides for operand in same) and _can_be_tried(node)


def _likeness(value: torch.Tensor) -> _Likeness:
    sizes = tuple(size_hint(size) for size in value.shape)
    strides = tuple(size_hint(stride) for stride in value.stride())
    small = tuple(min(size, 3) for size in sizes)
    covered = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    count = 1
    for size in sizes:
        count *= size
    following = 1 if covered == count else 2  # kernels ask whether a tensor has gaps
    found = [0] * len(sizes)
    for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], -dim)):
        if strides[dim]:
            found[dim] = following
            following *= max(small[dim], 1)
    return _Likeness(small, tuple(found), value.dtype, value.device.type)


def _kernel_strides(
    node: fx.Node, source: fx.Node | None = None, instead: torch.Tensor | None = None
) -> tuple[int, ...] | None:
    """Strides that the real kernel gives a small result, a source's value replaced; ``None``: it cannot be run."""

    def argument(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        known = instead if value is source else value.meta.get("val")
        if isinstance(known, torch.Tensor):
            return _likeness(known) if known.layout is torch.strided else None
        return size_hint(known) if isinstance(known, torch.SymInt) else known

    args = tuple(argument(value) for value in node.args)
    kwargs = tuple((name, argument(value)) for name, value in node.kwargs.items() if name != "device")
    try:
        strides = _run_small(node.target, args, kwargs)
    except TypeError:  # sizes or dimensions in a list: of no use to small tensors
        return None
    return strides if strides is not None and len(strides) == node.meta["val"].dim() else None


@functools.lru_cache(maxsize=4096)
def _run_small(target: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> tuple[int, ...] | None:
    def real(value: Any) -> Any:
        if not isinstance(value, _Likeness):
            return value
        reach = sum((size - 1) * stride for size, stride in zip(value.sizes, value.strides, strict=True)) + 1
        numbers = torch.ones(max(reach, 1), dtype=value.dtype, device=value.device)
        return numbers.as_strided(value.sizes, value.strides)

    with without_modes(), torch.no_grad():
        try:
            result = target(*map(real, args), **{name: real(value) for name, value in kwargs})
        except (RuntimeError, IndexError, NotImplementedError, AssertionError) as error:
            # No such kernel, no such device, or small tensors do not suit the operator: nothing is known of it.
            log.info("the layout of what %s returns cannot be tried: %s", target, error)
            return None
    return tuple(result.stride()) if isinstance(result, torch.Tensor) else None


def _same_order(sizes: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Whether strides put dimensions into the same order; those of one element do not count."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    return sorted(dims, key=lambda dim: -left[dim]) == sorted(dims, key=lambda dim: -right[dim])


def _order(sizes: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Dimensions from the outermost in memory to the innermost."""
    return sorted(range(len(sizes)), key=lambda dim: (-strides[dim] if sizes[dim] > 1 else 0, dim))


def _laid_out(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """A fake tensor like another, without gaps, with its dimensions in an order, outermost first."""
    with value.fake_mode:  # type: ignore[attr-defined]
        outer_first = value.new_empty([value.shape[dim] for dim in order])
        return outer_first.permute([list(order).index(dim) for dim in range(value.dim())])


def _restore(node: fx.Node, really: torch.Tensor, found: Sequence[int], wanted: Sequence[int]) -> None:
    users = list(node.users)
    node.meta["val"] = really
    following = node.next
    turned = insert_call(following, aten.permute.default, node, list(wanted))
    copied = insert_call(following, aten.clone.default, turned, memory_format=torch.contiguous_format)
    restored = insert_call(following, aten.permute.default, copied, [wanted.index(dim) for dim in range(really.dim())])
    for made in (turned, copied, restored):
        inherit_origin(made, node)
    for user in users:
        user.replace_input_with(node, restored)
