"""layouts: values lie in memory as the graph says.

The graph notes the strides that fake kernels chose while it was traced, and views rely on them (``view`` fails where
dimensions do not lie together, ``as_strided`` reads other elements). Two things make real strides differ:

- *Operators whose fake kernel is a decomposition* (``softplus_backward``, ``mse_loss_backward``, ``hardswish_backward``
  and more): where operands lie differently, it may order the result's dimensions like another operand than the real
  kernel does. A copy restores the order.
- *Zeros in place of an incoming gradient that nobody made*: one zero that is seen at every place has no order of
  dimensions to hand on. Where results would lie differently for it, the gradient is marked
  (:attr:`roundpipe_fx.joint_graph.Mark.STRIDED`), and its zeros are made in full.

Real strides are found by running an operator on small tensors that lie alike.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
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
    """Copy results that lie otherwise into the order of dimensions that the graph notes. Runs before annotate."""
    for node in list(joint.computed()):
        if not _may_lie_otherwise(node):
            continue
        noted, found = _likeness(node.meta["val"]), _kernel_strides(node)
        if found is not None and not _same_order(noted.sizes, found, noted.strides):
            _restore(node, _order(noted.sizes, found), _order(noted.sizes, noted.strides))
    return joint


def mark_strided_gradients(joint: JointGraph) -> JointGraph:
    """Mark incoming gradients whose strides matter even if they are zeros."""
    for tangent in joint.tangents:
        like = tangent.meta.get("val")
        if not isinstance(like, torch.Tensor) or like.dim() < 2:
            continue
        with like.fake_mode:  # type: ignore[attr-defined]
            zeros = like.new_zeros(()).expand(like.shape)
        if _strides_matter(tangent, zeros):
            tangent.meta[Mark.STRIDED] = True
    return joint


def _strides_matter(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether something follows otherwise if a node has a value that is one zero seen at every place."""
    for user in node.users:
        if user.op == "output":
            continue
        if not isinstance(user.target, torch._ops.OpOverload) or user.target is aten.as_strided.default:
            return True
        if is_view(user):
            viewed = _faked(user, node, value)
            if not isinstance(viewed, torch.Tensor) or _strides_matter(user, viewed):
                return True
        elif not _is_indifferent(user, node, value):
            return True
    return False


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


def _restore(node: fx.Node, found: Sequence[int], wanted: Sequence[int]) -> None:
    value = node.meta["val"]
    users = list(node.users)
    with value.fake_mode:
        outer_first = value.new_empty([value.shape[dim] for dim in found])
        node.meta["val"] = outer_first.permute([list(found).index(dim) for dim in range(value.dim())])
    following = node.next
    turned = insert_call(following, aten.permute.default, node, list(wanted))
    copied = insert_call(following, aten.clone.default, turned, memory_format=torch.contiguous_format)
    restored = insert_call(following, aten.permute.default, copied, [wanted.index(dim) for dim in range(value.dim())])
    for made in (turned, copied, restored):
        inherit_origin(made, node)
    for user in users:
        user.replace_input_with(node, restored)
