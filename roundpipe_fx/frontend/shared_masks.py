"""Shared masks: a mask that is the same for every sequence and head is computed once for all of them.

Hugging Face's models expand a mask to all sequences of a batch, and while they are traced they compare numbers of
packed sequences for each, although there is one sequence in each row. A sliding window then has as many values as the
batch has pairs of tokens, and attention makes a number of each. Where the form of such a mask
(:mod:`roundpipe_fx.frontend.index_forms`) reads rows and columns alone, it is written from these::

    rows, columns = torch.arange(8)[None, None, :, None], torch.arange(8)[None, None, None, :]
    near = columns - rows > -4 and columns <= rows and packed[:, rows] == packed[:, columns]    # [batch, 1, 8, 8]
    near = (rows - 3 <= columns) & (columns <= rows)                                            # [1, 1, 8, 8]
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundpipe_fx.frontend.affine_forms import Affine, IndexForm, list_conditions

SharedMasks = dict[tuple[Any, ...], fx.Node]
"""Masks that were written, by graph, form and sizes."""


def write_shared_mask(
    call: fx.Node, mask: fx.Node, form: IndexForm | None, operands: Mapping[str, Any], written: SharedMasks
) -> fx.Node | None:
    """Write a mask once for all sequences and heads.

    Args:
        call: the attention, before which it is written.
        mask: the mask that the call has.
        form: the values of the mask; ``None`` if they are not known.
        operands: those of the call, by parameter.
        written: masks that were written before; extended.

    Returns:
        ``None`` if each sequence or head may have its own, or if there is one for all already.
    """
    value, conditions = mask.meta["example_value"], None if form is None else list_conditions(form)
    if conditions is None or value.dtype is not torch.bool or not _is_expanded(value, operands):
        return None
    ordered = sorted(conditions, key=lambda condition: (condition.slopes, condition.offset))
    if not all(map(_is_written_simply, ordered)):
        return None
    key = (call.graph, tuple(ordered), str(tuple(value.shape[-2:])), value.dim(), value.device)
    if key not in written:
        written[key] = _write(call, ordered, value, operands)
    return written[key]


def _is_expanded(mask: torch.Tensor, operands: Mapping[str, Any]) -> bool:
    """Tell if there is a mask for each sequence or head, with a row for each query and a column for each key."""
    if mask.dim() < 3:
        return False
    sizes = [operands[name].meta["example_value"].shape[-2] for name in ("query", "key")]
    is_full = all(map(_is_equal, mask.shape[-2:], sizes))
    return is_full and not all(_is_equal(size, 1) for size in mask.shape[:-2])


def _is_equal(first: Any, second: Any) -> bool:
    return bool(statically_known_true(first == second))


def _is_written_simply(condition: Affine) -> bool:
    """Tell if a condition is ``row + offset <= column``, or the like with one of them alone."""
    *across, row, column = condition.slopes
    return not any(across) and (row, column) in {(0, 1), (0, -1), (1, 0), (-1, 0), (1, -1), (-1, 1)}


def _write(call: fx.Node, conditions: list[Affine], mask: Any, operands: Mapping[str, Any]) -> fx.Node:
    insert = functools.partial(_insert, call, mask.fake_mode)
    dims = mask.dim()
    indices: list[Any] = []
    for dim, name in ((-2, "query"), (-1, "key")):
        size = mask.shape[dim]
        length = size if isinstance(size, int) else insert("size", operands[name], -2)
        shape = tuple(slice(None) if position == dims + dim else None for position in range(dims))
        indices.append(insert(operator.getitem, insert(torch.arange, length, device=mask.device), shape))
    terms = []
    # A condition is positive terms + offset <= negative terms.
    for condition in conditions:
        slopes = condition.slopes[-2:]
        sides: dict[int, Any] = {slope: index for slope, index in zip(slopes, indices, strict=True) if slope}
        left, right = sides.get(1, 0), sides.get(-1, 0)
        if condition.offset:
            left = insert(operator.add, left, condition.offset) if 1 in sides else condition.offset
        terms.append(insert(operator.ge, right, left) if -1 in sides else insert(operator.le, left, right))
    return functools.reduce(lambda first, second: insert(operator.and_, first, second), terms)


def _insert(call: fx.Node, fake_mode: Any, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert an operation before a call, with its example value and the call's origin."""
    examples = fx.map_arg(args, lambda operand: operand.meta["example_value"])
    with call.graph.inserting_before(call), fake_mode:
        if isinstance(target, str):
            node = call.graph.call_method(target, args, kwargs)
            value = getattr(examples[0], target)(*examples[1:], **kwargs)
        else:
            node = call.graph.call_function(target, args, kwargs)
            value = target(*examples, **kwargs)
    node.meta = {key: kept for key, kept in call.meta.items() if key in ("stack_trace", "nn_module_stack")}
    node.meta["example_value"] = value
    return node
