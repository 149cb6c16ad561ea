"""Microbatches: splits a batch along its batch dimension, and merges outputs.

Without a specification every tensor of the batch's size is split along dimension 0; numbers, ``None``, zero-dimensional
tensors and objects without tensors are the same for every microbatch. Mappings, dataclasses and what else
:mod:`roundpipe_fx.pipeline.batches.structures` can take apart is split part by part; a list may have an item for each
sample. A batch of 7 rows in 3 microbatches::

    x         tensor (7, 4)                           (3, 4)  (2, 4)  (2, 4)
    images    list of 7 tensors of different sizes    3, 2 and 2 items: there is one for each sample
    levels    tensors (7, 16) and (7, 32)             (3, 16), (3, 32)   (2, 16), (2, 32)   (2, 16), (2, 32)
    mask      tensor (1, 4), "train", 0.5, None       the same for each
    pair      list of 7 tensors of 7 rows             an error: it may be either; so are 7 strings

What is not understood is an error that says how to specify it. A callable does everything itself, as in RoundPipe.

Offsets of sequences that are packed into one row (``cu_seqlens``) are no rows of a batch, whatever their number. They
begin with zero, rise, and end with the size of the tensor that the sequences are packed in. Parts of them mean nothing,
and neither do all of them for a part of the tensor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from roundpipe_fx.pipeline.batches.batch_leaves import (
    SPLIT_INPUT,
    SPLIT_LABEL,
    BatchLeaf,
    BatchTree,
    find_batch_leaves,
    keep_unmatched_inputs_whole,
    trees_of_inputs,
)
from roundpipe_fx.pipeline.batches.merging import merge, weighted_sum
from roundpipe_fx.pipeline.batches.structures import iterate_leaves, map_leaves, open_container
from roundpipe_fx.torch_private import tree_leaves

__all__ = [
    "Microbatch",
    "SplitTensor",
    "check_batch_sizes",
    "check_offsets",
    "has_different_sizes",
    "make_microbatches",
    "merge",
    "refuse_jagged",
    "row_counts",
    "split_inputs",
    "split_labels",
    "split_tensors",
    "weighted_sum",
]


def split_inputs(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    spec: Any = None,
    names: Sequence[str] = (),
    labels: Any = None,
    labels_spec: Any = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) of each microbatch.

    Args:
        args: positional inputs, any tree.
        kwargs: keyword inputs, any tree.
        count: how many microbatches. A batch that is not divisible gives some that are one larger; one that is smaller
            than ``count`` gives fewer, with a warning. One microbatch gets everything as it is.
        spec: ``None``; (spec of args, spec of kwargs), where ``None`` means the convention; or a callable
            ``(args, kwargs, count) -> (list of args, list of kwargs)``.
        names: of positional inputs, for messages.
        labels: what is split beside them; it may tell how many samples there are.
        labels_spec: by which it is split.

    Raises:
        ValueError: inputs have different batch sizes (the message names two), or none has one, or a list may have an
            item for each sample or not. If the spec gives a dimension for both, one may be a multiple of the other:
            rows of tokens, flattened.
        TypeError: the callable's result is not a pair of lists; or an object holds tensors, and nothing tells how to
            split it.
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
    # With one microbatch nothing is split, so nothing has to be understood.
    if count == 1:
        return [(args, kwargs)]
    trees = trees_of_inputs(args, kwargs, spec, names)
    others = [] if callable(labels_spec) else [BatchTree(labels, labels_spec, "labels", option=SPLIT_LABEL)]
    of_args, of_kwargs = find_batch_leaves(trees, others)
    leaves = keep_unmatched_inputs_whole([*of_args, *of_kwargs], warn=True)
    # Only what follows the convention: a specification says that the user means it.
    check_offsets([(leaf.full_label, leaf.value, leaf.dim is not None) for leaf in leaves if not leaf.specified])
    pieces = _split(leaves, count, SPLIT_INPUT)
    return [
        (
            _rebuild_with_parts(args, of_args, piece[: len(of_args)]),
            _rebuild_with_parts(kwargs, of_kwargs, piece[len(of_args) :]),
        )
        for piece in pieces
    ]


def _rebuild_with_parts(value: Any, leaves: Sequence[BatchLeaf], parts: Sequence[Any]) -> Any:
    """A value with parts of its leaves in their place."""
    by_path = {leaf.path: part for leaf, part in zip(leaves, parts, strict=True)}
    return map_leaves(lambda path, _: by_path[path], value, lambda path, _: path in by_path)


def split_labels(
    labels: Any, count: int, spec: Any = None, inputs: tuple[Any, Any] = ((), {}), inputs_spec: Any = None
) -> list[Any]:
    """Labels of each microbatch.

    Args:
        count: into how many the inputs were split.
        spec: ``None``, a spec, or a callable ``(labels, count) -> list``.
        inputs: (args, kwargs) of the batch, which may tell how many samples there are.
        inputs_spec: by which they were split.

    Raises:
        ValueError: they cannot be split into as many microbatches as the inputs.
        TypeError: they are or have an object that holds tensors, and nothing tells how to split it.
    """
    if callable(spec):
        pieces = list(spec(labels, count))
    elif count == 1:
        return [labels]
    else:
        others = [] if callable(inputs_spec) else trees_of_inputs(*inputs, inputs_spec)
        (leaves,) = find_batch_leaves([BatchTree(labels, spec, "labels", option=SPLIT_LABEL)], others)
        # Labels without rows (a number, a dict of constants) are the same for every microbatch.
        if not any(leaf.dim is not None for leaf in leaves):
            return [labels] * count
        pieces = [_rebuild_with_parts(labels, leaves, piece) for piece in _split(leaves, count, SPLIT_LABEL)]
    if len(pieces) != count:
        raise ValueError(f"labels were split into {len(pieces)} microbatches, but the inputs into {count}.")
    return pieces


@dataclass(frozen=True)
class SplitTensor:
    """A tensor that gets a gradient, and its parts.

    Attributes:
        parts: of the microbatches, in order.
    """

    whole: torch.Tensor
    dim: int
    parts: tuple[torch.Tensor, ...]


def split_tensors(value: Any, pieces: Sequence[Any], spec: Any = None) -> list[SplitTensor]:
    """The tensors that get gradients and were split by convention or by a specification.

    Args:
        pieces: that of each microbatch.
        spec: by which it was split. Only autograd knows how a callable splits.
    """
    if callable(spec) or len(pieces) < 2:
        return []
    return [
        SplitTensor(whole, _split_dim(whole, parts[0]), parts)
        for whole, parts in _split_parts(value, pieces)
        if isinstance(whole, torch.Tensor) and whole.requires_grad
    ]


def _split_parts(value: Any, pieces: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Tensors that were split, and lists that were split by their items, with their parts."""
    structure, of_pieces = open_container(value), [open_container(piece) for piece in pieces]
    # Where the structures of the pieces differ, the value was split as a whole (a list by its items); a part that is
    # the very object of the whole was not split.
    if structure is None or any(part is None or part.keys != structure.keys for part in of_pieces):
        if pieces[0] is not value:
            yield value, tuple(pieces)
        return
    for index, part in enumerate(structure.parts):
        yield from _split_parts(part, [of_piece.parts[index] for of_piece in of_pieces if of_piece is not None])


def _split_dim(whole: torch.Tensor, part: torch.Tensor) -> int:
    # The first dimension whose size changed. With one microbatch's worth of rows none has: dimension 0, by convention.
    return next((dim for dim, size in enumerate(whole.shape) if part.shape[dim] != size), 0)


def has_different_sizes(pieces: Sequence[Any]) -> bool:
    """Return whether tensors of some microbatches have other shapes than the first one's.

    Args:
        pieces: of each microbatch, any tree.
    """
    shapes = (
        [leaf.shape for _, _, leaf in iterate_leaves(piece) if isinstance(leaf, torch.Tensor)] for piece in pieces
    )
    first = next(shapes, None)
    return any(of_piece != first for of_piece in shapes)


def row_counts(
    args: tuple[Any, ...], kwargs: dict[str, Any], pieces: Sequence[tuple[Any, Any]], spec: Any = None
) -> list[int]:
    """Number of rows of each microbatch: those of the first tensor that was split, or of a list with an item for each
    sample; with a callable, of the first tensor.

    Args:
        pieces: (args, kwargs) of each microbatch.
        spec: by which they were split.
    """
    if callable(spec):
        # The user's function may return anything: the first tensor of each piece stands for its rows.
        return [_rows_of(piece) for piece in pieces]
    if len(pieces) > 1:
        whole, parts = next(_split_parts((args, kwargs), [tuple(piece) for piece in pieces]))
        if not isinstance(whole, torch.Tensor):
            return [len(part) for part in parts]
        return [part.shape[_split_dim(whole, parts[0])] for part in parts]
    # One microbatch: nothing was split, so the rows are those that a split would have used.
    of_args, of_kwargs = find_batch_leaves(trees_of_inputs(args, kwargs, spec), [])
    leaves = keep_unmatched_inputs_whole([*of_args, *of_kwargs])
    return [next((leaf.rows for leaf in leaves if leaf.dim is not None), 1)]


def _rows_of(piece: Any) -> int:
    tensors = (leaf for _, _, leaf in iterate_leaves(piece) if isinstance(leaf, torch.Tensor) and leaf.dim())
    first = next(tensors, None)
    return 1 if first is None else first.shape[0]


def check_batch_sizes(
    args: Any, kwargs: Any, labels: Any, count: int, inputs_spec: Any = None, labels_spec: Any = None
) -> None:
    """Check that inputs and labels have the same batch size, if both follow the convention or both a specification.

    Raises:
        ValueError: they do not.
    """
    # Only like is compared with like: a convention may disagree with a specification on purpose.
    if callable(inputs_spec) or callable(labels_spec) or (inputs_spec is None) != (labels_spec is None) or count == 1:
        return
    trees = trees_of_inputs(args, kwargs, inputs_spec)
    of_labels = BatchTree(labels, labels_spec, "labels", option=SPLIT_LABEL)
    inputs = [leaf for leaves in find_batch_leaves(trees, [of_labels]) for leaf in leaves]
    (leaves,) = find_batch_leaves([of_labels], trees)
    _find_batch_size(
        [*keep_unmatched_inputs_whole(inputs), *leaves], count, SPLIT_INPUT if inputs_spec is None else SPLIT_LABEL
    )


def _find_batch_size(leaves: Sequence[BatchLeaf], count: int, option: str) -> int:
    """The batch size, the least where they may differ.

    Args:
        count: into how many microbatches.
        option: name of the option by which a user says how.
    """
    split = [leaf for leaf in leaves if leaf.dim is not None]
    if not split:
        raise ValueError("no input is a tensor with a batch dimension, so there is nothing to split into microbatches.")
    sizes = [leaf.rows for leaf in split]
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
        # 8 rows and 16 rows of beams can both be split into 4: a specification may give multiples of a divisible size.
        alike = size % least == 0 == sizes[0] % least and least % count == 0
        if not alike:
            raise ValueError(
                f"{first.label} has {sizes[0]} along dimension {first.dim} and {leaf.label} {size} along dimension "
                f"{leaf.dim}, so as specified they cannot be split alike into {count} microbatches: sizes must be "
                "equal, or multiples of one that is divisible by the number of microbatches. A callable may split as "
                "it likes."
            )
    return least


def _split(leaves: Sequence[BatchLeaf], count: int, option: str) -> list[list[Any]]:
    size = _find_batch_size(leaves, count, option)
    # Fewer rows than microbatches: empty microbatches would give losses of NaN.
    if size < count:
        warnings.warn(
            f"roundpipe_fx: a batch of {size} cannot be split into {count} microbatches; using {size}.", stacklevel=4
        )
        count = size
    # Columns are inputs, rows are microbatches: `columns[input][microbatch]` is transposed.
    columns = [leaf.split(count) if count > 1 else [leaf.value] for leaf in leaves]
    return [[column[index] for column in columns] for index in range(count)]


class Microbatch(NamedTuple):
    """The inputs of one microbatch, split by the caller.

    Attributes:
        args: positional inputs of the model.
        labels: for the loss function.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any


def make_microbatches(batches: Sequence[Any], most: int, has_loss_fn: bool) -> list[Microbatch]:
    """The microbatches of a caller who has split the batch.

    Args:
        batches: for each a mapping of keyword inputs, or a tuple of positional ones.
        most: how many the model is compiled for.
        has_loss_fn: whether ``labels`` among keyword inputs are for a loss function.

    Raises:
        TypeError: one is neither.
        ValueError: there is none, there are too many, or only some have labels.
    """
    if isinstance(batches, (Mapping, str, torch.Tensor)) or not isinstance(batches, Sequence):
        raise TypeError(
            f"microbatches must be a list with an item for each microbatch, not a {type(batches).__name__}."
        )
    if not batches:
        raise ValueError("microbatches is empty: give at least one.")
    if len(batches) > most:
        raise ValueError(
            f"{len(batches)} microbatches were given, but the model is compiled for {most}, and so are its schedule "
            f"and its plan: compile it with num_microbatches={len(batches)}."
        )
    microbatches = []
    for index, item in enumerate(batches):
        if isinstance(item, Mapping):
            kwargs = dict(item)
            # Without a `loss_fn` the model takes the labels itself, among its keyword arguments.
            labels = kwargs.pop("labels", None) if has_loss_fn else None
            microbatches.append(Microbatch((), kwargs, labels))
        elif type(item) is tuple:
            microbatches.append(Microbatch(item, {}, None))
        else:
            raise TypeError(
                f"microbatches[{index}] is a {type(item).__name__}: each must be a dict of the model's keyword "
                "arguments (and labels), or a tuple of its positional ones."
            )
    # Mixed: a mean over labels would be of some microbatches only.
    if len({microbatch.labels is None for microbatch in microbatches}) > 1:
        raise ValueError("some microbatches have labels and others do not: all or none must.")
    return microbatches


_OFFSET_NAMES = re.compile(
    r"(?:^|[._\['( ])(?:cu_?seq_?lens?\w*|(?:\w+_)?offsets?|(?:\w+_)?indptr|crow_indices|(?:\w+_)?ptr)\W*$"
)
_OFFSET_DTYPES = (torch.int32, torch.int64)


def check_offsets(inputs: Sequence[tuple[str, Any, bool]]) -> None:
    """Refuse offsets, by their name, that nothing tells how to split; warn of tensors that look like some.

    Args:
        inputs: name, value, and whether it is split, of inputs without a specification.

    Raises:
        ValueError: an input has the name of offsets.
    """
    for label, value, is_split in inputs:
        if (
            not isinstance(value, torch.Tensor)
            or value.dim() != 1
            or value.dtype not in _OFFSET_DTYPES
            or len(value) < 2
        ):
            continue
        what = "offsets of sequences, which belong to all that is packed and not to a row of the batch"
        say = (
            "Give split_input=a function, (args, kwargs, count) -> (list of args, list of kwargs), that splits between "
            "sequences, or the microbatches themselves, forward_backward(microbatches=[…]); a specification "
            "split_input=(specs of args, specs of kwargs) with 0 in its place splits it all the same, and with None "
            "every microbatch gets all of it"
        )
        if _OFFSET_NAMES.search(label):
            raise ValueError(f"{label} has the name of {what}. {say}.")
        # The name alone decides for an error, the elements for a warning: reading elements of CUDA tensors would make
        # the host wait.
        others = [other for _, other, _ in inputs if isinstance(other, torch.Tensor) and other is not value]
        if is_split and _is_like_offsets(value, {size for other in others for size in other.shape}):
            warnings.warn(
                f"roundpipe_fx: {label} is split like the batch, since it has as many elements as the batch has rows, "
                f"but it looks like {what}: it begins with 0, rises, and ends with the size of another input. {say}.",
                stacklevel=5,
            )


def _is_like_offsets(value: torch.Tensor, sizes: set[int]) -> bool:
    """Test for the elements of offsets; they are read on the CPU only, where the host does not wait for them."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or len(value) < 3:
        return False
    # `cu_seqlens` of three sequences of 3, 5 and 2 tokens: [0, 3, 8, 10], and a tensor of 10 tokens beside it.
    last = int(value[-1])
    return last in sizes and last >= len(value) and int(value[0]) == 0 and bool((value.diff() > 0).all())


def refuse_jagged(inputs: Any) -> None:
    """Raise for jagged tensors, which have no dimension of the batch to split.

    Args:
        inputs: of the model, to be split by convention.

    Raises:
        ValueError: one of them is jagged.
    """
    for value in tree_leaves(inputs):
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ValueError(
                "a jagged (nested) tensor cannot be split into microbatches: pass padded tensors and a mask, or values "
                "and offsets as separate tensors with split_input= a callable (args, kwargs, count) -> (list of args, "
                "list of kwargs). A pipeline needs the model in one graph, in which such tensors cannot be either; "
                "roundpipe_fx.compile(model) without num_microbatches and devices takes them."
            )
