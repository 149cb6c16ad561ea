"""Host syncs: operations that must run once per step. Compiler, counter and eager scopes share this predicate.

An operation counts as a host sync if the host has to wait for the device, or if it makes a discrete decision from data:

- tags ``dynamic_output_shape`` and ``data_dependent_output`` (``nonzero``, ``unique``, ``item``);
- indexing by a mask; ``index`` always has the first tag, but synchronizes only for boolean or byte indices;
- copies from an accelerator to the host;
- *selections*: operators that return ``indices`` (``topk``, ``sort``, ``max`` along a dimension), ``argmax``,
  ``multinomial``, ``searchsorted`` and similar ones. Their indices decide where tokens and gradients go; recomputed
  from values that were rounded differently, they could differ from those of the forward. Pooling is not a selection:
  only its own kernels read its indices, and they are recomputed together;
- operators that the user registered (:func:`roundpipe_fx.register_sync_op`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import has_tag

aten = torch.ops.aten

_BY_INDEX = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
)
_MASKED_INSIDE = (aten.masked_scatter_backward.default,)
"""Operators that index by a mask internally, although their results have a known size."""
_SELECTING = (aten.argmax, aten.argmin, aten.multinomial, aten.searchsorted, aten.bucketize)


def why_host_sync(
    operator: torch._ops.OpOverload,
    args: Sequence[Any],
    operands: Iterable[torch.Tensor],
    results: Iterable[torch.Tensor],
    registered: Collection[Any] = (),
) -> str | None:
    """Why an operation must not be repeated.

    Args:
        args: its positional arguments, nodes or tensors.
        operands: tensors that it reads, real or fake.
        results: tensors that it returns, real or fake.
        registered: operators that the user declared to force a host sync.

    Returns:
        the reason in a few words; ``None`` if the operation may be repeated.
    """
    # Both forms are accepted: one overload (``torch.ops.my.route.default``), or an operator with all of its overloads.
    if operator in registered or operator.overloadpacket in registered:
        return "registered by the user"
    # Asked before the tags: `index` has the tag ``dynamic_output_shape`` because of masks alone.
    if operator in _BY_INDEX:
        return "its size depends on data" if any(map(_is_mask, args[1])) else None
    if has_tag(operator, torch.Tag.data_dependent_output):
        return "its result is read by the host"
    if has_tag(operator, torch.Tag.dynamic_output_shape) or operator in _MASKED_INSIDE:
        return "its size depends on data"
    if _copies_to_host(operands, results):
        return "copied from the device to the host"
    return "decides a route" if _selects(operator) else None


def _is_mask(index: Any) -> bool:
    value = index.meta.get("val") if isinstance(index, fx.Node) else index
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def _copies_to_host(operands: Iterable[torch.Tensor], results: Iterable[torch.Tensor]) -> bool:
    # All results must be on the host: an operation with results on both is a computation of the device.
    kinds = {value.device.type for value in results}
    return kinds == {"cpu"} and any(value.device.type not in ("cpu", "meta") for value in operands)


@functools.cache
def _selects(operator: torch._ops.OpOverload) -> bool:
    # Pooling returns its indices without a name, so it is no selection.
    named = any(result.name == "indices" for result in operator._schema.returns)
    return named or operator.overloadpacket in _SELECTING


_registered: set[Any] = set()


def register_sync_op(op: Callable[..., Any]) -> None:
    """Declare that a custom operator makes the host wait for the device, or decides a shape or a route.

    Models compiled afterwards run it once per step, in the forward, and save its results; recomputation never runs it
    again.

    Args:
        op: the operator: ``torch.ops.mylib.myop``, one overload of it, or the result of ``torch.library.custom_op``.

    Raises:
        TypeError: ``op`` is not an operator. Python functions are traced through, so declaring one would have no
            effect.
    """
    op = getattr(op, "_opoverload", op)
    if not isinstance(op, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        raise TypeError(
            f"register_sync_op takes an operator (torch.ops.<namespace>.<name>, or the result of "
            f"torch.library.custom_op), not {type(op).__name__}."
        )
    _registered.add(op)


def registered_sync_ops() -> frozenset[Any]:
    """The operators that have been declared."""
    return frozenset(_registered)
