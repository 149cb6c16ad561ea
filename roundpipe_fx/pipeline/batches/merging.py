"""Merging: the outputs of all microbatches as one, with their types.

Tensors are concatenated along dimension 0, losses summed with weights, and what is equal in all microbatches is
returned once. For a batch of 5 rows, in microbatches of 3 and 2 whose losses have the weights 0.6 and 0.4::

    logits    of shape (3, 5), (2, 5)         of shape (5, 5)
    loss      1.0, 2.0                        1.4
    tokens    7, 9: tensors of integers       16: counts have no weights
    names     ["a", "b", "c"], ["d", "e"]     ["a", "b", "c", "d", "e"]: an item for each row
    scale     the model's parameter, twice    the parameter
    mode      "train", "train"                "train"; values that differ are an error
    rows      3, 3: Python's integers         an error: it may count the rows of a microbatch

What is not understood is an error that names ``merge_output``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_fx.pipeline.batches.structures import (
    BY_CONVENTION,
    Path,
    broadcast_specs,
    holds_tensors,
    iterate_leaves,
    open_container,
    parse_split_dim,
)


def merge(
    outputs: Sequence[Any],
    spec: Any = None,
    weights: Sequence[float] | None = None,
    rows: Sequence[int] | None = None,
) -> Any:
    """Outputs of all microbatches as one. That of a single microbatch is returned as it is.

    Args:
        outputs: trees of the same structure, in order.
        spec: ``None``: tensors are concatenated along dimension 0, zero-dimensional ones summed, and lists with an item
            for each row put together; a tensor of the model, and what else is equal in all microbatches, is returned
            once; a spec; or a callable that gets the list.
        weights: of each microbatch's losses, the zero-dimensional tensors of floating-point numbers; ``None``: one.
        rows: of each microbatch; ``None``: they are not known.

    Raises:
        TypeError: an output is an object, or a number that differs between microbatches.
        ValueError: the microbatches' outputs have different structures, or a dimension that is not the batch's.
    """
    if callable(spec) and not hasattr(spec, "reduce_fn"):
        return spec(list(outputs))
    if len(outputs) == 1 and spec is None:
        return outputs[0]
    return _Merge(broadcast_specs(spec, outputs[0]), weights, rows).merge(list(outputs), (), "")


_MERGE_OUTPUT = "merge_output=a function that gets the list of the microbatches' outputs"


@dataclass(frozen=True)
class _Merge:
    """Merges outputs of microbatches.

    Attributes:
        weights: of each microbatch's losses.
        concatenated: by the identities of its parts, what was concatenated by convention: an output that is returned
            twice is one tensor.
    """

    specs: Mapping[Path, Any]
    weights: Sequence[float] | None
    rows: Sequence[int] | None
    concatenated: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def merge(self, values: list[Any], path: Path, text: str) -> Any:
        """The parts of all microbatches' outputs at one path as one."""
        structures = [open_container(value) for value in values]
        # Different types (a tensor and None, say) or a specification for this very part: no structure to descend into.
        if any(type(value) is not type(values[0]) for value in values) or path in self.specs:
            return self._merge_leaf(values, self.specs.get(path, BY_CONVENTION), f"output{text}")
        parts = [structure for structure in structures if structure is not None]
        if len(parts) < len(values):
            return self._merge_leaf(values, BY_CONVENTION, f"output{text}")
        first = parts[0]
        is_specified = any(prefix[: len(path)] == path for prefix in self.specs)
        is_list = first.is_sequence and not isinstance(values[0], tuple)
        if is_list and not is_specified and self._has_item_for_each_row(values, f"output{text}"):
            # A list with an item for each row is the batch's: [a, b] and [c] become [a, b, c]. Any other list is merged
            # item by item.
            return first.rebuild([item for structure in parts for item in structure.parts])
        if any(set(structure.keys) != set(first.keys) for structure in parts):
            kinds = sorted(
                {f"{type(value).__name__}{list(part.keys)}" for value, part in zip(values, parts, strict=True)}
            )
            raise ValueError(
                f"microbatches returned outputs of different structures: output{text} is {' and '.join(kinds[:2])}. "
                f"Give {_MERGE_OUTPUT}."
            )
        # Keys are matched by name, since dictionaries may list them in different orders.
        by_key = [dict(zip(structure.keys, structure.parts, strict=True)) for structure in parts]
        return first.rebuild(
            [self.merge([one[key] for one in by_key], (*path, key), text + first.text_of(key)) for key in first.keys]
        )

    def _has_item_for_each_row(self, values: list[Any], label: str) -> bool:
        """Return whether lists have an item for each row, instead of tensors with all rows.

        Raises:
            ValueError: both may be.
        """
        # The number of items decides first: a list is one of samples only if each microbatch's has as many items as
        # rows.
        if self.rows is None or any(len(value) != count for value, count in zip(values, self.rows, strict=True)):
            return False
        # Lists of different lengths cannot be merged item by item, so they can only be one of samples.
        if len({len(value) for value in values}) > 1:
            return True
        sizes = [
            (leaf.shape[0], count)
            for value, count in zip(values, self.rows, strict=True)
            for _, _, leaf in iterate_leaves(value)
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        # Tensors inside with another size than the rows are whole values of one sample each.
        if sizes and any(size != count for size, count in sizes):
            return True
        # As many items as rows, and tensors with as many rows as well: both readings fit, and no reading may be
        # guessed.
        raise ValueError(
            f"{label} is a {type(values[0]).__name__} with as many items as a microbatch has rows: there may be one "
            f"for each row, or each may be of all rows. Return a tuple if they are of all rows, or give "
            f"{_MERGE_OUTPUT}."
        )

    def _merge_leaf(self, values: list[Any], spec: Any, label: str) -> Any:
        if hasattr(spec, "reduce_fn"):
            total = spec.init_value
            for value in values:
                total = spec.reduce_fn(total, value)
            return total
        if spec is False:
            raise TypeError("merge_output=False: merge_output=list gives the list of what the microbatches return.")
        if spec is not BY_CONVENTION:
            dim = parse_split_dim(spec)
            if dim is None or len(values) == 1:
                return values[0]
            return _concatenate(values, dim)
        if len(values) == 1:
            return values[0]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            return self._require_equal(values, label)
        if len(tensors) < len(values):
            raise ValueError(
                f"microbatches returned outputs of different structures: {label} is a tensor in some and none in "
                f"others. Give {_MERGE_OUTPUT}."
            )
        # Parameters, buffers and inputs that no microbatch splits are the same tensor in all of them; the batch's is
        # that tensor.
        if self.rows is not None and _is_one_tensor(tensors):
            return tensors[0]
        if not tensors[0].dim():
            return self._sum_values(tensors, label)
        self._check_rows(tensors, label)
        # Two outputs that are one tensor (`logits` and `loss_logits`) stay one: equal parts give one merged tensor.
        parts = tuple(map(id, tensors))
        if parts not in self.concatenated:
            self.concatenated[parts] = _concatenate(tensors, 0)
        return self.concatenated[parts]

    def _sum_values(self, values: list[torch.Tensor], label: str) -> torch.Tensor:
        if values[0].dtype == torch.bool:
            raise TypeError(
                f"{label} is true or false for each microbatch, and roundpipe_fx does not know what it is for the "
                f"batch: give {_MERGE_OUTPUT}."
            )
        # Counts are exact sums: weights are for means.
        exact = not (values[0].is_floating_point() or values[0].is_complex())
        return weighted_sum(values, None if exact else self.weights)

    def _check_rows(self, values: list[torch.Tensor], label: str) -> None:
        """Check that the first dimension of tensors can be the batch's: sizes that depend on data may be any."""
        sizes = {value.shape[0] for value in values}
        if self.rows is None or len(sizes) > 1:
            return
        (size,) = sizes
        # Rows are a multiple of the microbatch's where a model repeats samples (beam search: rows × beams).
        if len({*self.rows}) > 1 or size % self.rows[0]:
            raise ValueError(
                f"{label} has {size} along its first dimension in each microbatch, of {self.rows[0]} rows, so that is "
                "not the batch's dimension, and roundpipe_fx does not know how to merge it: give merge_output, a "
                "specification or a function that gets the list of the microbatches' outputs."
            )

    def _require_equal(self, values: list[Any], label: str) -> Any:
        """Return the value that is equal in all microbatches."""
        first = values[0]
        kind = type(first).__name__
        if not isinstance(first, nn.Module) and holds_tensors(first):
            raise TypeError(
                f"the model returns an object, {kind} ({label}), that holds tensors and cannot be taken apart, so the "
                f"microbatches' outputs cannot be put together. Give {_MERGE_OUTPUT}; or return tensors, a dict or a "
                "dataclass, or register the class with torch.utils._pytree.register_pytree_node."
            )
        if not all(_is_equal(value, first) for value in values[1:]):
            differing = (
                f": {first!r} and {next(v for v in values if not _is_equal(v, first))!r}" if _is_plain(first) else ""
            )
            raise TypeError(
                f"{label} is a {kind} that differs between microbatches{differing}, and roundpipe_fx does not "
                f"know what it is for the batch. Give {_MERGE_OUTPUT}; or return a tensor: of no dimensions it is "
                "averaged as a loss is, of rows it is concatenated."
            )
        sizes = first if isinstance(first, torch.Size) else (first,)
        # A number equal to the rows may count them, and then it is the sum for the batch; returning one microbatch's
        # would be silently wrong.
        if self.rows is not None and any(type(size) is int and size == self.rows[0] for size in sizes):
            raise TypeError(
                f"{label} is {first!r}, which is also the number of rows of a microbatch, and would be another number "
                f"for the batch if it counts them. Give {_MERGE_OUTPUT}."
            )
        return first


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, complex, str, bytes, type(None), torch.Size))


def _is_equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if _is_plain(value):
        return type(value) is type(other) and repr(value) == repr(other)  # NaN equals itself
    try:
        return type(value) is type(other) and (value == other) is True
    except Exception:  # a comparison of the user's
        return False


def _is_one_tensor(values: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are one: a parameter, a buffer, or an input that every microbatch gets whole."""
    first = values[0]
    if all(value is first for value in values):
        return True
    if any(value.layout is not torch.strided or value.is_meta or type(value) is not type(first) for value in values):
        return False
    # Shape and strides below compare memory. An expanded tensor's rows share memory, so equal memory says nothing about
    # it.
    if type(first) not in (torch.Tensor, nn.Parameter) or (first.dim() and not first.stride(0)):
        return False  # rows of an expanded tensor are one in memory
    return all(
        value.untyped_storage()._cdata == first.untyped_storage()._cdata
        and (value.shape, value.stride(), value.storage_offset(), value.dtype)
        == (first.shape, first.stride(), first.storage_offset(), first.dtype)
        and (value.is_conj(), value.is_neg()) == (first.is_conj(), first.is_neg())
        for value in values
    )


def _concatenate(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    whole = _find_original(values, dim)
    return torch.cat(list(values), dim) if whole is None else whole


def _find_original(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """The tensor that was split into these parts, which share its storage: outputs that are inputs, or views of them.

    As without microbatches, they take no memory of their own.
    """
    first = parts[0]
    if any(type(part) is not torch.Tensor or part.layout is not torch.strided or part.is_meta for part in parts):
        return None
    if any(part.is_conj() or part.is_neg() or part.dtype != first.dtype for part in parts):
        return None
    shape, offset = list(first.shape), first.storage_offset()
    dim, shape[dim] = dim % len(shape), 0
    counts = [index == dim or size > 1 for index, size in enumerate(first.shape)]  # strides of one row say nothing
    # Invariant: `offset` is where the next part has to begin if the parts are consecutive slices of one tensor along
    # `dim`.
    for part in parts:
        if part.untyped_storage()._cdata != first.untyped_storage()._cdata or part.storage_offset() != offset:
            return None
        if [*part.shape[:dim], *part.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
            return None
        if any(
            of_part != of_first
            for of_part, of_first, is_read in zip(part.stride(), first.stride(), counts, strict=True)
            if is_read
        ):
            return None
        offset += part.shape[dim] * part.stride(dim)
        shape[dim] += part.shape[dim]
    base = first._base
    # The tensor itself, if it is what the parts were sliced from: then the output is the user's own input.
    if (
        base is not None
        and all(part._base is base for part in parts)
        and (
            list(base.shape) == shape
            and base.stride() == first.stride()
            and base.storage_offset() == first.storage_offset()
            and base.dtype == first.dtype
        )
    ):
        return base
    # A new view of the memory would not be connected to the graph of the parts.
    if any(part.requires_grad for part in parts):
        return None
    return first.as_strided(shape, first.stride(), first.storage_offset())


def weighted_sum(values: Sequence[torch.Tensor], weights: Sequence[float] | None) -> torch.Tensor:
    """The sum of values, each times its weight; one value is returned as it is."""
    if weights is None or len(values) == 1:
        weights = [1.0] * len(values)
    total = values[0] if weights[0] == 1.0 else values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value if weight == 1.0 else torch.add(total, value, alpha=weight)
    return total
