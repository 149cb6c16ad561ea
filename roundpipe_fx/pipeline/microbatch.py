"""Microbatches: splits a batch along its batch dimension, and merges outputs.

Without a specification every tensor of the batch's size is split along dimension 0; numbers, ``None``, zero-dimensional
tensors and everything else are the same for every microbatch. Specifications are those of
``torch.distributed.pipelining``: a tree like the value's, or a prefix of it, of ``TensorChunkSpec(dim)`` (or just the
``int``) and ``_Replicate`` (or just ``None``); in outputs also a reducer like ``sum_reducer``. A callable does
everything itself, as in RoundPipe.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch

from roundpipe_fx.torch_private import is_replicate_spec, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

__all__ = [
    "SplitTensor",
    "check_batch_sizes",
    "merge",
    "row_counts",
    "sizes_differ",
    "split_inputs",
    "split_labels",
    "split_tensors",
    "weighted_sum",
]


def split_inputs(
    args: tuple[Any, ...], kwargs: dict[str, Any], count: int, spec: Any = None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) of each microbatch.

    Args:
        args: positional inputs, any tree.
        kwargs: keyword inputs, any tree.
        count: how many microbatches. A batch that is not divisible gives some that are one larger; one that is smaller
            than ``count`` gives fewer, with a warning.
        spec: ``None``; (spec of args, spec of kwargs), where ``None`` means the convention; or a callable
            ``(args, kwargs, count) -> (list of args, list of kwargs)``.

    Raises:
        ValueError: inputs have different batch sizes (the message names two), or none has one. If the spec gives a
            dimension for both, one may be a multiple of the other: rows of tokens, flattened.
        TypeError: the callable's result is not a pair of lists.
    """
    if callable(spec):
        try:
            split_args, split_kwargs = spec(args, kwargs, count)
        except (TypeError, ValueError) as error:
            raise TypeError(f"split_input must return (list of args, list of kwargs): {error}") from error
        if len(split_args) != len(split_kwargs):
            raise ValueError(
                f"split_input returned {len(split_args)} args and {len(split_kwargs)} kwargs; there must be one of "
                "each for every microbatch."
            )
        return [(tuple(a), dict(k)) for a, k in zip(split_args, split_kwargs, strict=True)]
    args_spec, kwargs_spec = (None, None) if spec is None else spec
    args_leaves = _leaves(args, args_spec, "args")
    kwargs_leaves = _leaves(kwargs, kwargs_spec, "")
    pieces = _split(_of_the_batch([*args_leaves, *kwargs_leaves], warn=True), count, _INPUTS)
    (_, args_tree), (_, kwargs_tree) = tree_flatten_with_path(args), tree_flatten_with_path(kwargs)
    return [
        (tree_unflatten(piece[: len(args_leaves)], args_tree), tree_unflatten(piece[len(args_leaves) :], kwargs_tree))
        for piece in pieces
    ]


def split_labels(labels: Any, count: int, spec: Any = None) -> list[Any]:
    """Labels of each microbatch.

    Args:
        labels: any tree.
        count: into how many the inputs were split.
        spec: ``None``, a spec, or a callable ``(labels, count) -> list``.

    Raises:
        ValueError: they cannot be split into as many microbatches as the inputs.
    """
    if callable(spec):
        pieces = list(spec(labels, count))
    else:
        leaves = _leaves(labels, spec, "labels")
        _, tree = tree_flatten_with_path(labels)
        if not any(leaf.dim is not None for leaf in leaves):
            return [labels] * count
        pieces = [tree_unflatten(piece, tree) for piece in _split(leaves, count, _LABELS)]
    if len(pieces) != count:
        raise ValueError(f"labels were split into {len(pieces)} microbatches, but the inputs into {count}.")
    return pieces


@dataclass(frozen=True)
class SplitTensor:
    """A tensor that gets a gradient, and its parts.

    Attributes:
        whole: it.
        dim: along which dimension.
        parts: of the microbatches, in order.
    """

    whole: torch.Tensor
    dim: int
    parts: tuple[torch.Tensor, ...]


def split_tensors(value: Any, pieces: Sequence[Any], spec: Any = None) -> list[SplitTensor]:
    """The tensors that get gradients and were split by convention or by a specification.

    Args:
        value: any tree.
        pieces: that of each microbatch.
        spec: by which it was split. Only autograd knows how a callable splits.
    """
    if callable(spec) or len(pieces) < 2:
        return []
    columns = zip(*map(tree_leaves, pieces), strict=True)
    return [
        SplitTensor(leaf.value, leaf.dim, parts)
        for leaf, parts in zip(_leaves(value, spec, ""), columns, strict=True)
        if leaf.dim is not None and leaf.value.requires_grad and parts[0] is not leaf.value
    ]


def sizes_differ(pieces: Sequence[Any]) -> bool:
    """Whether tensors of some microbatches have other shapes than the first one's.

    Args:
        pieces: of each microbatch, any tree.
    """
    shapes = ([value.shape for value in tree_leaves(piece) if isinstance(value, torch.Tensor)] for piece in pieces)
    first = next(shapes, None)
    return any(of_piece != first for of_piece in shapes)


def row_counts(
    args: tuple[Any, ...], kwargs: dict[str, Any], pieces: Sequence[tuple[Any, Any]], spec: Any = None
) -> list[int]:
    """Number of rows of each microbatch: those of the first tensor that was split; with a callable, of the first
    tensor.

    Args:
        args: positional inputs.
        kwargs: keyword inputs.
        pieces: (args, kwargs) of each microbatch.
        spec: by which they were split.
    """
    if callable(spec):
        firsts = [
            next((v for v in tree_leaves(piece) if isinstance(v, torch.Tensor) and v.dim()), None) for piece in pieces
        ]
        return [1 if first is None else first.shape[0] for first in firsts]
    args_spec, kwargs_spec = (None, None) if spec is None else spec
    leaves = _of_the_batch([*_leaves(args, args_spec, "args"), *_leaves(kwargs, kwargs_spec, "")])
    place, dim = next((index, leaf.dim) for index, leaf in enumerate(leaves) if leaf.dim is not None)
    return [tree_leaves(piece)[place].shape[dim] for piece in pieces]


def check_batch_sizes(
    args: Any, kwargs: Any, labels: Any, count: int, inputs_spec: Any = None, labels_spec: Any = None
) -> None:
    """Check that inputs and labels have the same batch size, if both follow the convention or both a specification.

    Raises:
        ValueError: they do not.
    """
    if callable(inputs_spec) or callable(labels_spec) or (inputs_spec is None) != (labels_spec is None):
        return
    args_spec, kwargs_spec = (None, None) if inputs_spec is None else inputs_spec
    inputs = _of_the_batch([*_leaves(args, args_spec, "args"), *_leaves(kwargs, kwargs_spec, "")])
    of_labels = _leaves(labels, labels_spec, "labels")
    _size([*inputs, *of_labels], count, _INPUTS if inputs_spec is None else _LABELS)


def merge(outputs: Sequence[Any], spec: Any = None, weights: Sequence[float] | None = None) -> Any:
    """Outputs of all microbatches as one.

    Args:
        outputs: trees of the same structure, in order.
        spec: ``None``: tensors are concatenated along dimension 0, zero-dimensional ones summed, and everything else is
            the first microbatch's; a spec; or a callable that gets the list.
        weights: of each microbatch's losses, the zero-dimensional tensors of floating-point numbers; ``None``: one.

    Raises:
        TypeError: an output is a dataclass that PyTorch cannot take apart.
        ValueError: the microbatches' outputs have different structures.
    """
    if callable(spec) and not hasattr(spec, "reduce_fn"):
        return spec(list(outputs))
    flat = [tree_flatten_with_path(output) for output in outputs]
    trees = {str(tree) for _, tree in flat}
    if len(trees) > 1:
        raise ValueError(f"microbatches returned outputs of different structures: {' and '.join(sorted(trees)[:2])}.")
    (first, tree), specs = flat[0], _spread(spec, outputs[0])
    merged = []
    for index, (path, _) in enumerate(first):
        merged.append(_merged([leaves[index][1] for leaves, _ in flat], specs.get(path, _CONVENTION), weights, path))
    return tree_unflatten(merged, tree)


_CONVENTION = object()


def _check_no_tensors_inside(value: Any, path: Any) -> None:
    """An object that PyTorch cannot look into would be the first microbatch's, and cut off from the backward."""
    if not is_dataclass(value):
        return
    if any(isinstance(leaf, torch.Tensor) for name in fields(value) for leaf in tree_leaves(getattr(value, name.name))):
        where = f"output{keystr(path)}"
        raise TypeError(
            f"the model returns a dataclass with tensors, {type(value).__name__} ({where}), which PyTorch cannot take "
            "apart, so the microbatches' outputs cannot be put together. Return a tuple, a dict or a named tuple, or "
            "register the class once with torch.utils._pytree.register_dataclass."
        )


def _merged(values: list[Any], spec: Any, weights: Sequence[float] | None, path: Any) -> Any:
    if hasattr(spec, "reduce_fn"):
        total = spec.init_value
        for value in values:
            total = spec.reduce_fn(total, value)
        return total
    if spec is _CONVENTION:
        if not isinstance(values[0], torch.Tensor):
            _check_no_tensors_inside(values[0], path)
            return values[0]
        if not values[0].dim():
            exact = not (values[0].is_floating_point() or values[0].is_complex())
            return weighted_sum(values, None if exact else weights)
        spec = 0
    if spec is False:
        raise TypeError("merge_output=False: merge_output=list gives the list of what the microbatches return.")
    dim = _dim(spec)
    if dim is None:
        return values[0]
    if len(values) == 1:
        return values[0]
    whole = _whole(values, dim)
    return torch.cat(values, dim) if whole is None else whole


def _whole(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
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
    if any(part.requires_grad for part in parts):
        return None
    return first.as_strided(shape, first.stride(), first.storage_offset())


def weighted_sum(values: Sequence[torch.Tensor], weights: Sequence[float] | None) -> torch.Tensor:
    """The sum of values, each times its weight; one value is returned as it is.

    Args:
        values: at least one.
        weights: ``None``: one each.
    """
    if weights is None or len(values) == 1:
        weights = [1.0] * len(values)
    total = values[0] if weights[0] == 1.0 else values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value if weight == 1.0 else torch.add(total, value, alpha=weight)
    return total


class _Leaf(NamedTuple):
    """A leaf of the tree that is split.

    Attributes:
        label: its name for the user.
        value: it.
        dim: dimension to split along; ``None``: the same for all.
        specified: whether a specification says so.
    """

    label: str
    value: Any
    dim: int | None
    specified: bool


_INPUTS = "split_input=(specs of args, specs of kwargs)"
_LABELS = "split_label=a spec"


def _leaves(value: Any, spec: Any, name: str) -> list[_Leaf]:
    """Every leaf, with how it is split."""
    specs = _spread(spec, value)
    leaves = []
    for path, leaf in tree_flatten_with_path(value)[0]:
        asked = specs.get(path, _CONVENTION)
        by_convention = 0 if isinstance(leaf, torch.Tensor) and leaf.dim() else None
        dim = by_convention if asked is _CONVENTION else _dim(asked)
        where = keystr(path)
        label = f"{name}{where}" if name else where.removeprefix("['").replace("']", "", 1)
        if dim is not None and (not isinstance(leaf, torch.Tensor) or not -leaf.dim() <= dim < leaf.dim()):
            kind = f"tensor of {leaf.dim()} dimensions" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ValueError(f"{label} cannot be split along dimension {dim}: it is a {kind}.")
        leaves.append(_Leaf(label, leaf, dim, asked is not _CONVENTION))
    return leaves


def _of_the_batch(leaves: list[_Leaf], warn: bool = False) -> list[_Leaf]:
    """By convention an input whose size differs from the batch's, and that no other input shares, is the same for each.

    The batch's size is that of the inputs that are specified to be split, or of the first input that has more than one
    row. Sizes that several inputs share are a mistake, which :func:`_size` reports.

    Args:
        leaves: the inputs.
        warn: whether to warn if only the order of the inputs determines which one is the batch.
    """
    split = [leaf for leaf in leaves if leaf.dim is not None]
    sizes = Counter(leaf.value.shape[leaf.dim] for leaf in split)
    if len(sizes) < 2:
        return leaves
    candidates = [leaf for leaf in split if leaf.specified] or [leaf for leaf in split if leaf.value.shape[0] != 1]
    batch = candidates[0].value.shape[candidates[0].dim]
    leaves_of_batch = []
    for leaf in leaves:
        if leaf.dim is not None and not leaf.specified:
            size = leaf.value.shape[leaf.dim]
            if size != batch and (size == 1 or sizes[size] == 1):
                if warn and size != 1 and sizes[batch] == 1 and not candidates[0].specified:
                    warnings.warn(
                        f"roundpipe_fx: {candidates[0].label} has {batch} rows and {leaf.label} {size}; the first is "
                        f"taken to be the batch, and {leaf.label} is the same for every microbatch. {_INPUTS} says "
                        "what is split.",
                        stacklevel=5,
                    )
                leaf = leaf._replace(dim=None)
        leaves_of_batch.append(leaf)
    return leaves_of_batch


def _spread(spec: Any, value: Any) -> dict[Any, Any]:
    """The spec expanded to every leaf."""
    if spec is None:
        return {}
    is_spec = lambda item: item is None or _is_spec(item)  # noqa: E731
    specs = tree_flatten_with_path(spec, is_leaf=is_spec)[0]
    spread = {}
    for path, _ in tree_flatten_with_path(value)[0]:
        above = [item for place, item in specs if path[: len(place)] == place]
        if above:
            spread[path] = above[0]
    return spread


def _is_spec(item: Any) -> bool:
    return isinstance(item, int) or hasattr(item, "split_dim") or hasattr(item, "reduce_fn") or is_replicate_spec(item)


def _dim(spec: Any) -> int | None:
    if spec is None or is_replicate_spec(spec):
        return None
    dim = getattr(spec, "split_dim", spec)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(
            f"{spec!r} does not say how to split: give a dimension (int), None to replicate, or torch.distributed."
            "pipelining's TensorChunkSpec and _Replicate."
        )
    return dim


def _size(leaves: Sequence[_Leaf], count: int, option: str) -> int:
    """The batch size, the least where they may differ.

    Args:
        leaves: the inputs.
        count: into how many microbatches.
        option: name of the option by which a user says how.
    """
    split = [leaf for leaf in leaves if leaf.dim is not None]
    if not split:
        raise ValueError("no input is a tensor with a batch dimension, so there is nothing to split into microbatches.")
    sizes = [int(leaf.value.shape[leaf.dim]) for leaf in split]
    first, least = split[0], min(sizes)
    for leaf, size in zip(split, sizes, strict=True):
        if not size:
            raise ValueError(f"the batch is empty: {leaf.label} has no rows.")
        if size == sizes[0]:
            continue
        if not (leaf.specified and first.specified):
            raise ValueError(
                f"batch sizes differ: {first.label} has {sizes[0]}, {leaf.label} has {size}. What is the same for "
                f"every microbatch needs a specification: {option}, None meaning the same."
            )
        alike = size % least == 0 == sizes[0] % least and least % count == 0
        if not alike:
            raise ValueError(
                f"{first.label} has {sizes[0]} along dimension {first.dim} and {leaf.label} {size} along dimension "
                f"{leaf.dim}, so as specified they cannot be split alike into {count} microbatches: sizes must be "
                "equal, or multiples of one that is divisible by the number of microbatches. A callable may split as "
                "it likes."
            )
    return least


def _split(leaves: Sequence[_Leaf], count: int, option: str) -> list[list[Any]]:
    size = _size(leaves, count, option)
    if size < count:
        warnings.warn(
            f"roundpipe_fx: a batch of {size} cannot be split into {count} microbatches; using {size}.", stacklevel=4
        )
        count = size
    columns = [
        list(leaf.value.tensor_split(count, leaf.dim)) if leaf.dim is not None and count > 1 else [leaf.value] * count
        for leaf in leaves
    ]
    return [[column[index] for column in columns] for index in range(count)]
