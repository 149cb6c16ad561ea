"""strided_gradients: mark incoming gradients whose strides matter even if they are zeros.

Missing incoming gradients are represented by an expanded scalar zero, whose strides are all 0. Such a tensor has no
order of dimensions that a kernel could give to its result. Where a result would therefore get other strides than the
graph records, and an operation after it depends on them, the gradient is marked
(:attr:`roundpipe_fx.ir.joint_graph.Mark.STRIDED`) and its zeros are allocated in full::

    expanded zero × transposed value  →  view        the product has the other operand's order, the view fails: marked
    sum of an expanded zero           →  view        the sum has the recorded strides either way: not marked
    expanded zero + transposed value  →  sum         numbers are added in another order and round otherwise: marked
    group norm's gradient of an expanded zero        the kernel reads memory in order, past the only number: marked

Users are followed until an operation depends on the strides, or has the recorded result either way. Autograd makes
operands contiguous for kernels that read memory in order. Of an incoming gradient that is contiguous already nothing of
that is left in the graph, so a formula of a user's own operator may rely on it as well: what is not PyTorch's own
operator depends on the strides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import probe_small_values
from roundpipe_fx.analysis.fake_results import result_tensors, run_fake_kernel, same_dimension_order
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, has_tag, is_seeded, is_tensor, is_view
from roundpipe_fx.torch_private import size_hint

aten = torch.ops.aten

_IN_MEMORY_ORDER = (aten.native_group_norm_backward, aten._weight_norm_interface_backward)
"""Operators that read their first operand as it lies in memory, whatever its strides are."""
_OPERATORS = ("aten", "prims", "roundpipe_fx")
"""Namespaces of operators whose kernels read operands by their strides, but for those above."""


def mark_strided_gradients(joint: JointGraph) -> JointGraph:
    """Mark incoming gradients that must not be an expanded zero. Runs after layouts are restored.

    Args:
        joint: the graph; its tangents' ``meta`` is written.

    Returns:
        The same graph.
    """
    returned = {value for value in joint.forward_outputs if isinstance(value, fx.Node)}
    for tangent in joint.tangents:
        fake = tangent.meta.get("val")
        if not isinstance(fake, torch.Tensor) or not fake.dim():
            continue
        # As the gradient would be if nobody passed one: a single zero, expanded.
        with fake.fake_mode:  # type: ignore[attr-defined]
            zeros = fake.new_zeros(()).expand(fake.shape)
        if _strides_matter(tangent, zeros, True, returned, {}):
            tangent.meta[Mark.STRIDED] = True
    return joint


def _strides_matter(
    node: fx.Node, value: torch.Tensor, zeros: bool, returned: Collection[fx.Node], known: dict[Any, bool]
) -> bool:
    """Test for an operation that fails, reads other elements or rounds otherwise if a node's value has other strides
    than are recorded.

    Args:
        value: fake, with the other strides.
        zeros: whether it is the zeros themselves, or a view of them, which add up to zero in any order.
        returned: the forward's outputs: autograd derives their views from the recorded strides.
        known: answers so far, by node and strides.
    """
    key = node, str(value.stride()), zeros
    if key not in known:
        # Cycles cannot occur; the entry ends repeated visits of shared users.
        known[key] = False  # until the users have been visited
        known[key] = node in returned or any(_depends(user, node, value, zeros, returned, known) for user in node.users)
    return known[key]


def _depends(
    user: fx.Node,
    node: fx.Node,
    value: torch.Tensor,
    zeros: bool,
    returned: Collection[fx.Node],
    known: dict[Any, bool],
) -> bool:
    """Return whether a user of a node, or an operation after it, depends on the strides of the node's value."""
    if user.op == "output":
        return False
    target = user.target
    if not isinstance(target, torch._ops.OpOverload) or target is aten.as_strided.default:
        return True
    if target.namespace not in _OPERATORS or (target.overloadpacket in _IN_MEMORY_ORDER and user.args[0] is node):
        return not _lies_as_recorded(node, value)
    if not is_view(user):
        # Sums of zeros are zero in any order; of other numbers, order is rounding.
        if not zeros and not has_tag(target, torch.Tag.pointwise):
            return not _lies_as_recorded(node, value)
        if _has_recorded_result(user, node, value):
            return False
    result = _result(user, node, value)
    return result is None or _strides_matter(user, result, zeros and is_view(user), returned, known)


def _lies_as_recorded(node: fx.Node, value: torch.Tensor) -> bool:
    """Test for a value with the strides that are recorded, but for dimensions without a second element."""
    recorded = node.meta["val"]
    return all(
        size_hint(size) < 2 or size_hint(step) == size_hint(traced)
        for size, step, traced in zip(value.shape, value.stride(), recorded.stride(), strict=True)
    )


def _result(node: fx.Node, source: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
    """A node's result if an operand has another value; ``None``: it fails, or nothing is known about it."""
    if not is_tensor(node):
        return None
    result = _small_result(node, source, value)
    if result is None:
        result = run_fake_kernel(node, source, value)
    return result if isinstance(result, torch.Tensor) else None


def _has_recorded_result(node: fx.Node, source: fx.Node, value: torch.Tensor) -> bool:
    """Return whether a node's results have the recorded order of dimensions if an operand has another value."""
    result = _small_result(node, source, value)
    if result is not None:
        return same_dimension_order(node.meta["val"], result)
    results, recorded = result_tensors(run_fake_kernel(node, source, value)), result_tensors(node.meta.get("val"))
    return len(results) == len(recorded) and all(map(same_dimension_order, recorded, results))


def _small_result(node: fx.Node, source: fx.Node, value: torch.Tensor) -> torch.Tensor | None:
    """A node's result as the real kernel returns it, run on small tensors; ``None`` if it cannot be run."""
    if not _can_run_small(node):
        return None
    values = probe_small_values(node, lambda operand: value if operand is source else operand.meta.get("val"))
    return None if values is None else values[0]


def _can_run_small(node: fx.Node) -> bool:
    """Test for an operator that can run on small made-up tensors: PyTorch's own, without random numbers."""
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "aten"
        and is_tensor(node)
        and node.meta["val"].layout is torch.strided
        and not is_seeded(node)
        and not is_view(node)
    )
