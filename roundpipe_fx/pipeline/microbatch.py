"""Microbatches: splits a batch along its batch dimension, and merges outputs.

Without a specification every tensor of the batch's size is split along dimension 0; numbers, ``None``, zero-dimensional
tensors and objects without tensors are the same for every microbatch. Mappings, dataclasses and what else
:mod:`roundpipe_fx.pipeline.structures` can take apart is split part by part; a list may have an item for each sample.
What is not understood is an error. Specifications are those of ``torch.distributed.pipelining``: a tree like the
value's, or a prefix of it, of ``TensorChunkSpec(dim)`` (or just the ``int``) and ``_Replicate`` (or just ``None``); in
outputs also a reducer like ``sum_reducer``. A callable does everything itself, as in RoundPipe.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from roundpipe_fx.pipeline.offsets import check_offsets
from roundpipe_fx.pipeline.structures import Path, holds_tensors, leaves_of, map_leaves, structure_of
from roundpipe_fx.torch_private import is_replicate_spec

__all__ = [
    "Microbatch",
    "SplitTensor",
    "check_batch_sizes",
    "given_microbatches",
    "merge",
    "row_counts",
    "sizes_differ",
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
    if count == 1:
        return [(args, kwargs)]
    trees = _trees_of_inputs(args, kwargs, spec, names)
    beside = [] if callable(labels_spec) else [_Tree(labels, labels_spec, "labels", option=_LABELS)]
    of_args, of_kwargs = _leaves(trees, beside)
    leaves = _of_the_batch([*of_args, *of_kwargs], warn=True)
    check_offsets([(leaf.full_label, leaf.value, leaf.dim is not None) for leaf in leaves if not leaf.specified])
    pieces = _split(leaves, count, _INPUTS)
    return [
        (_piece(args, of_args, piece[: len(of_args)]), _piece(kwargs, of_kwargs, piece[len(of_args) :]))
        for piece in pieces
    ]


def _piece(value: Any, leaves: Sequence[_Leaf], parts: Sequence[Any]) -> Any:
    """A value with parts of its leaves in their place."""
    by_path = {leaf.path: part for leaf, part in zip(leaves, parts, strict=True)}
    return map_leaves(lambda path, _: by_path[path], value, lambda path, _: path in by_path)


def split_labels(
    labels: Any, count: int, spec: Any = None, inputs: tuple[Any, Any] = ((), {}), inputs_spec: Any = None
) -> list[Any]:
    """Labels of each microbatch.

    Args:
        labels: any tree.
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
        beside = [] if callable(inputs_spec) else _trees_of_inputs(*inputs, inputs_spec)
        (leaves,) = _leaves([_Tree(labels, spec, "labels", option=_LABELS)], beside)
        if not any(leaf.dim is not None for leaf in leaves):
            return [labels] * count
        pieces = [_piece(labels, leaves, piece) for piece in _split(leaves, count, _LABELS)]
    if len(pieces) != count:
        raise ValueError(f"labels were split into {len(pieces)} microbatches, but the inputs into {count}.")
    return pieces


class Microbatch(NamedTuple):
    """The inputs of one microbatch, split by the caller.

    Attributes:
        args: positional inputs of the model.
        kwargs: its keyword inputs.
        labels: for the loss function.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any


def given_microbatches(given: Sequence[Any], most: int, has_loss_fn: bool) -> list[Microbatch]:
    """The microbatches of a caller who has split the batch.

    Args:
        given: for each a mapping of keyword inputs, or a tuple of positional ones.
        most: how many the model is compiled for.
        has_loss_fn: whether ``labels`` among keyword inputs are for a loss function.

    Raises:
        TypeError: one is neither.
        ValueError: there is none, there are too many, or only some have labels.
    """
    if isinstance(given, (Mapping, str, torch.Tensor)) or not isinstance(given, Sequence):
        raise TypeError(f"microbatches must be a list with an item for each microbatch, not a {type(given).__name__}.")
    if not given:
        raise ValueError("microbatches is empty: give at least one.")
    if len(given) > most:
        raise ValueError(
            f"{len(given)} microbatches were given, but the model is compiled for {most}, and so are its schedule and "
            f"its plan: compile it with num_microbatches={len(given)}."
        )
    microbatches = []
    for index, item in enumerate(given):
        if isinstance(item, Mapping):
            kwargs = dict(item)
            labels = kwargs.pop("labels", None) if has_loss_fn else None
            microbatches.append(Microbatch((), kwargs, labels))
        elif type(item) is tuple:
            microbatches.append(Microbatch(item, {}, None))
        else:
            raise TypeError(
                f"microbatches[{index}] is a {type(item).__name__}: each must be a dict of the model's keyword "
                "arguments (and labels), or a tuple of its positional ones."
            )
    if len({microbatch.labels is None for microbatch in microbatches}) > 1:
        raise ValueError("some microbatches have labels and others do not: all or none must.")
    return microbatches


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
    return [
        SplitTensor(whole, _split_dim(whole, parts[0]), parts)
        for whole, parts in _split_parts(value, pieces)
        if isinstance(whole, torch.Tensor) and whole.requires_grad
    ]


def _split_parts(value: Any, pieces: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Tensors that were split, and lists that were split by their items, with their parts."""
    structure, of_pieces = structure_of(value), [structure_of(piece) for piece in pieces]
    if structure is None or any(part is None or part.keys != structure.keys for part in of_pieces):
        if pieces[0] is not value:
            yield value, tuple(pieces)
        return
    for index, part in enumerate(structure.parts):
        yield from _split_parts(part, [of_piece.parts[index] for of_piece in of_pieces if of_piece is not None])


def _split_dim(whole: torch.Tensor, part: torch.Tensor) -> int:
    return next((dim for dim, size in enumerate(whole.shape) if part.shape[dim] != size), 0)


def sizes_differ(pieces: Sequence[Any]) -> bool:
    """Whether tensors of some microbatches have other shapes than the first one's.

    Args:
        pieces: of each microbatch, any tree.
    """
    shapes = ([leaf.shape for _, _, leaf in leaves_of(piece) if isinstance(leaf, torch.Tensor)] for piece in pieces)
    first = next(shapes, None)
    return any(of_piece != first for of_piece in shapes)


def row_counts(
    args: tuple[Any, ...], kwargs: dict[str, Any], pieces: Sequence[tuple[Any, Any]], spec: Any = None
) -> list[int]:
    """Number of rows of each microbatch: those of the first tensor that was split, or of a list with an item for each
    sample; with a callable, of the first tensor.

    Args:
        args: positional inputs.
        kwargs: keyword inputs.
        pieces: (args, kwargs) of each microbatch.
        spec: by which they were split.
    """
    if callable(spec):
        return [_rows_of(piece) for piece in pieces]
    if len(pieces) > 1:
        whole, parts = next(_split_parts((args, kwargs), [tuple(piece) for piece in pieces]))
        if not isinstance(whole, torch.Tensor):
            return [len(part) for part in parts]
        return [part.shape[_split_dim(whole, parts[0])] for part in parts]
    of_args, of_kwargs = _leaves(_trees_of_inputs(args, kwargs, spec), [])
    leaves = _of_the_batch([*of_args, *of_kwargs])
    return [next((leaf.rows for leaf in leaves if leaf.dim is not None), 1)]


def _rows_of(piece: Any) -> int:
    tensors = (leaf for _, _, leaf in leaves_of(piece) if isinstance(leaf, torch.Tensor) and leaf.dim())
    first = next(tensors, None)
    return 1 if first is None else first.shape[0]


def check_batch_sizes(
    args: Any, kwargs: Any, labels: Any, count: int, inputs_spec: Any = None, labels_spec: Any = None
) -> None:
    """Check that inputs and labels have the same batch size, if both follow the convention or both a specification.

    Raises:
        ValueError: they do not.
    """
    if callable(inputs_spec) or callable(labels_spec) or (inputs_spec is None) != (labels_spec is None) or count == 1:
        return
    trees = _trees_of_inputs(args, kwargs, inputs_spec)
    of_labels = _Tree(labels, labels_spec, "labels", option=_LABELS)
    inputs = [leaf for leaves in _leaves(trees, [of_labels]) for leaf in leaves]
    (leaves,) = _leaves([of_labels], trees)
    _size([*_of_the_batch(inputs), *leaves], count, _INPUTS if inputs_spec is None else _LABELS)


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
    return _Merge(_spread(spec, outputs[0]), weights, rows).merged(list(outputs), (), "")


_MERGE_OUTPUT = "merge_output=a function that gets the list of the microbatches' outputs"


@dataclass(frozen=True)
class _Merge:
    """How outputs are merged.

    Attributes:
        specs: by path.
        weights: of each microbatch's losses.
        rows: of each microbatch.
    """

    specs: Mapping[Path, Any]
    weights: Sequence[float] | None
    rows: Sequence[int] | None

    def merged(self, values: list[Any], path: Path, text: str) -> Any:
        """The parts of all microbatches' outputs at one path as one."""
        structures = [structure_of(value) for value in values]
        if any(type(value) is not type(values[0]) for value in values) or path in self.specs:
            return self._leaf(values, self.specs.get(path, _CONVENTION), f"output{text}")
        parts = [structure for structure in structures if structure is not None]
        if len(parts) < len(values):
            return self._leaf(values, _CONVENTION, f"output{text}")
        first = parts[0]
        is_specified = any(place[: len(path)] == path for place in self.specs)
        is_list = first.is_sequence and not isinstance(values[0], tuple)
        if is_list and not is_specified and self._has_item_for_each_row(values, f"output{text}"):
            return first.rebuild([item for structure in parts for item in structure.parts])
        if any(set(structure.keys) != set(first.keys) for structure in parts):
            kinds = sorted(
                {f"{type(value).__name__}{list(part.keys)}" for value, part in zip(values, parts, strict=True)}
            )
            raise ValueError(
                f"microbatches returned outputs of different structures: output{text} is {' and '.join(kinds[:2])}. "
                f"Give {_MERGE_OUTPUT}."
            )
        by_key = [dict(zip(structure.keys, structure.parts, strict=True)) for structure in parts]
        return first.rebuild(
            [self.merged([one[key] for one in by_key], (*path, key), text + first.text_of(key)) for key in first.keys]
        )

    def _has_item_for_each_row(self, values: list[Any], label: str) -> bool:
        """Whether lists have an item for each row, instead of tensors with all rows.

        Raises:
            ValueError: both may be.
        """
        if self.rows is None or any(len(value) != count for value, count in zip(values, self.rows, strict=True)):
            return False
        if len({len(value) for value in values}) > 1:
            return True
        sizes = [
            (leaf.shape[0], count)
            for value, count in zip(values, self.rows, strict=True)
            for _, _, leaf in leaves_of(value)
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if sizes and any(size != count for size, count in sizes):
            return True
        raise ValueError(
            f"{label} is a {type(values[0]).__name__} with as many items as a microbatch has rows: there may be one "
            f"for each row, or each may be of all rows. Return a tuple if they are of all rows, or give "
            f"{_MERGE_OUTPUT}."
        )

    def _leaf(self, values: list[Any], spec: Any, label: str) -> Any:
        if hasattr(spec, "reduce_fn"):
            total = spec.init_value
            for value in values:
                total = spec.reduce_fn(total, value)
            return total
        if spec is False:
            raise TypeError("merge_output=False: merge_output=list gives the list of what the microbatches return.")
        if spec is not _CONVENTION:
            dim = _dim(spec)
            if dim is None or len(values) == 1:
                return values[0]
            return _concatenated(values, dim)
        if len(values) == 1:
            return values[0]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if not tensors:
            return self._constant(values, label)
        if len(tensors) < len(values):
            raise ValueError(
                f"microbatches returned outputs of different structures: {label} is a tensor in some and none in "
                f"others. Give {_MERGE_OUTPUT}."
            )
        if self.rows is not None and _are_the_same(tensors):
            return tensors[0]
        if not tensors[0].dim():
            return self._sum(tensors, label)
        self._check_rows(tensors, label)
        return _concatenated(tensors, 0)

    def _sum(self, values: list[torch.Tensor], label: str) -> torch.Tensor:
        if values[0].dtype == torch.bool:
            raise TypeError(
                f"{label} is true or false for each microbatch, and roundpipe_fx does not know what it is for the "
                f"batch: give {_MERGE_OUTPUT}."
            )
        exact = not (values[0].is_floating_point() or values[0].is_complex())
        return weighted_sum(values, None if exact else self.weights)

    def _check_rows(self, values: list[torch.Tensor], label: str) -> None:
        """Check that the first dimension of tensors can be the batch's: sizes that depend on data may be any."""
        sizes = {value.shape[0] for value in values}
        if self.rows is None or len(sizes) > 1:
            return
        (size,) = sizes
        if len({*self.rows}) > 1 or size % self.rows[0]:
            raise ValueError(
                f"{label} has {size} along its first dimension in each microbatch, of {self.rows[0]} rows, so that is "
                "not the batch's dimension, and roundpipe_fx does not know how to merge it: give merge_output, a "
                "specification or a function that gets the list of the microbatches' outputs."
            )

    def _constant(self, values: list[Any], label: str) -> Any:
        """What is equal in all microbatches."""
        first = values[0]
        kind = type(first).__name__
        if not isinstance(first, nn.Module) and holds_tensors(first):
            raise TypeError(
                f"the model returns an object, {kind} ({label}), that holds tensors and cannot be taken apart, so the "
                f"microbatches' outputs cannot be put together. Give {_MERGE_OUTPUT}; or return tensors, a dict or a "
                "dataclass, or register the class with torch.utils._pytree.register_pytree_node."
            )
        if not all(_is_equal(value, first) for value in values[1:]):
            told = f": {first!r} and {next(v for v in values if not _is_equal(v, first))!r}" if _is_plain(first) else ""
            raise TypeError(
                f"{label} is a {kind} that differs between microbatches{told}, and roundpipe_fx does not know what it "
                f"is for the batch. Give {_MERGE_OUTPUT}; or return a tensor: of no dimensions it is averaged as a "
                "loss is, of rows it is concatenated."
            )
        sizes = first if isinstance(first, torch.Size) else (first,)
        if self.rows is not None and any(type(size) is int and size == self.rows[0] for size in sizes):
            raise TypeError(
                f"{label} is {first!r}, which is also the number of rows of a microbatch, and would be another number "
                f"for the batch if it counts them. Give {_MERGE_OUTPUT}."
            )
        return first


_CONVENTION = object()


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


def _are_the_same(values: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are one: a parameter, a buffer, or an input that every microbatch gets whole."""
    first = values[0]
    if all(value is first for value in values):
        return True
    if any(value.layout is not torch.strided or value.is_meta or type(value) is not type(first) for value in values):
        return False
    if type(first) not in (torch.Tensor, nn.Parameter) or (first.dim() and not first.stride(0)):
        return False  # rows of an expanded tensor are one in memory
    return all(
        value.untyped_storage()._cdata == first.untyped_storage()._cdata
        and (value.shape, value.stride(), value.storage_offset(), value.dtype)
        == (first.shape, first.stride(), first.storage_offset(), first.dtype)
        and (value.is_conj(), value.is_neg()) == (first.is_conj(), first.is_neg())
        for value in values
    )


def _concatenated(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    whole = _whole(values, dim)
    return torch.cat(list(values), dim) if whole is None else whole


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


@dataclass(frozen=True)
class _Tree:
    """A value that is split.

    Attributes:
        value: it.
        spec: how; ``None``: by convention.
        name: ``"args"`` or ``"labels"``; ``""``: keyword arguments.
        option: by which a user says how.
        names: of positional arguments.
    """

    value: Any
    spec: Any
    name: str
    option: str
    names: Sequence[str] = ()

    def label(self, path: Path, text: str) -> str:
        """The name of a part for the user."""
        return f"{self.name}{text}" if self.name else text.removeprefix("['").replace("']", "", 1)

    def full_label(self, path: Path, text: str) -> str:
        """The same, with the name of a positional argument."""
        label = self.label(path, text)
        known = self.name == "args" and path and path[0] < len(self.names)
        return f"{label} ({self.names[path[0]]}{text.removeprefix(f'[{path[0]}]')})" if known else label


def _trees_of_inputs(args: Any, kwargs: Any, spec: Any, names: Sequence[str] = ()) -> list[_Tree]:
    args_spec, kwargs_spec = (None, None) if spec is None else spec
    return [_Tree(args, args_spec, "args", _INPUTS, names), _Tree(kwargs, kwargs_spec, "", _INPUTS)]


class _Leaf(NamedTuple):
    """A leaf of the tree that is split.

    Attributes:
        label: its name for the user.
        full_label: the same, with the name of a positional argument.
        value: it; of a list that is split by its items, all of it.
        path: where it is.
        dim: dimension to split along; ``None``: the same for all.
        specified: whether a specification says so.
    """

    label: str
    full_label: str
    value: Any
    path: Path
    dim: int | None
    specified: bool

    @property
    def rows(self) -> int:
        """Its size along the dimension that is split."""
        assert self.dim is not None
        return int(self.value.shape[self.dim]) if isinstance(self.value, torch.Tensor) else len(self.value)

    def split(self, count: int) -> list[Any]:
        """The part of each microbatch."""
        if self.dim is None:
            return [self.value] * count
        if isinstance(self.value, torch.Tensor):
            return list(self.value.tensor_split(count, self.dim))
        structure = structure_of(self.value)
        assert structure is not None
        fewer, larger = divmod(len(self.value), count)
        ends = itertools.accumulate((fewer + (index < larger) for index in range(count)), initial=0)
        return [structure.rebuild(structure.parts[start:end]) for start, end in itertools.pairwise(ends)]


_INPUTS = "split_input=(specs of args, specs of kwargs)"
_LABELS = "split_label=a spec"


class _List(NamedTuple):
    """A list or tuple among inputs or labels, whose items may be samples.

    Attributes:
        label: its name for the user.
        value: it.
        path: where it is.
        option: by which a user says how it is split.
        sizes: of its tensors, along their first dimension, where it is not one.
        has_tensors: whether there are any, also of no dimensions.
        is_uniform: whether items are of one kind, as samples are.
    """

    label: str
    value: Any
    path: Path
    option: str
    sizes: frozenset[int]
    has_tensors: bool
    is_uniform: bool

    def has_item_for_each_of(self, samples: int | None) -> bool:
        """Whether there may be an item for each sample, of several."""
        return self.is_uniform and len(self.value) == samples != 1

    @property
    def rows(self) -> int | None:
        """Rows of a batch of which all tensors have a row for each sample; ``None``: they have not."""
        return next(iter(self.sizes)) if len(self.sizes) == 1 else None

    def refused(self, batch: int | None) -> ValueError:
        """The error that says what a user may do."""
        kind = f"{self.label} is a {type(self.value).__name__} of {len(self.value)} items"
        if not self.has_tensors:
            why = f"without tensors, as many as the batch has rows: there may be one for each of the {batch} samples"
            instead = "with 0 in its place its items are split, with None every microbatch gets all of it"
        else:
            sizes = ", ".join(map(str, sorted(self.sizes))) or "no dimension"
            rows = "" if batch is None else f", and the batch {batch} rows"
            why = (
                f"whose tensors have {sizes} along their first dimension{rows}: there may be an item for each sample, "
                "or each item may have all samples"
            )
            instead = (
                "with 0 in its place each of its tensors is split along dimension 0, with None every microbatch gets "
                "all of it, and a function splits it by samples"
            )
        return ValueError(
            f"{kind} {why}. Say how it is split, {self.option}: {instead}; or give the microbatches, "
            "forward_backward(microbatches=[…])."
        )


def _leaves(trees: Sequence[_Tree], beside: Sequence[_Tree]) -> list[list[_Leaf]]:
    """Every leaf of each tree, with how it is split.

    Args:
        trees: what is split.
        beside: what else the batch has, which may tell how many samples there are.

    Raises:
        ValueError: a list may have an item for each sample or not.
        TypeError: an object holds tensors, and nothing tells how to split it.
    """
    free = [leaf for tree in trees for leaf in _leaves_outside_lists(tree)]
    lists = [(tree, one) for tree in trees for one in _lists_of(tree)]
    by_items: dict[int, set[Path]] = {id(tree): set() for tree in trees}
    with_tensors = [one for _, one in lists if one.has_tensors]
    batch = _rows_of_batch(free)
    if batch is None and lists:
        batch = _rows_of_batch([leaf for tree in beside for leaf in _leaves_outside_lists(tree)])
    if batch is None and with_tensors:
        every = [*with_tensors, *(one for tree in beside for one in _lists_of(tree) if one.has_tensors)]
        batch = _rows_of_lists(every)
    for tree, one in lists:
        are_samples = one.has_item_for_each_of(batch)
        if not one.has_tensors:
            if are_samples:
                raise one.refused(batch)
            continue
        have_rows = one.rows is not None and one.rows == batch
        if (are_samples and have_rows) or (not (are_samples or have_rows) and one.sizes):
            raise one.refused(batch)
        if are_samples:
            by_items[id(tree)].add(one.path)
    leaves = [_leaves_of(tree, by_items[id(tree)]) for tree in trees]
    for tree, of_tree in zip(trees, leaves, strict=True):
        for leaf in of_tree:
            if not leaf.specified and leaf.dim is None and not isinstance(leaf.value, torch.Tensor):
                _refuse_object(leaf, tree.option)
    return leaves


def _rows_of_batch(leaves: Sequence[_Leaf]) -> int | None:
    """The batch's size by tensors that are no items of lists; ``None``: they do not tell."""
    split = [leaf for leaf in leaves if leaf.dim is not None]
    candidates = [leaf for leaf in split if leaf.specified] or [leaf for leaf in split if leaf.rows != 1]
    return candidates[0].rows if candidates else None


def _rows_of_lists(lists: Sequence[_List]) -> int:
    """The batch's size where all that it has are lists.

    Raises:
        ValueError: items may be samples or not.
    """
    rows, samples = {one.rows for one in lists if one.sizes}, len(lists[0].value)
    have_rows = len(rows) == 1 and None not in rows
    are_samples = all(one.has_item_for_each_of(samples) for one in lists)
    if have_rows == are_samples:
        raise lists[0].refused(None)
    return samples if are_samples else next(size for size in rows if size is not None)


def _refuse_object(leaf: _Leaf, option: str) -> None:
    """Refuse an object whose tensors may belong to the batch, or an iterator, which the first microbatch would empty.

    Raises:
        TypeError: it is one.
    """
    value = leaf.value
    if isinstance(value, nn.Module) or not (isinstance(value, Iterator) or holds_tensors(value)):
        return
    name = option.partition("=")[0]
    kind = "an iterator" if isinstance(value, Iterator) else "an object that holds tensors or arrays"
    function = "(args, kwargs, count) -> (list of args, list of kwargs)"
    if option is _LABELS:
        function = "(labels, count) -> list of labels"
    raise TypeError(
        f"{leaf.full_label} is {kind}, {type(value).__name__}, and roundpipe_fx does not know which of them have a row "
        f"for each sample. Give {name}=a function, {function}, or a specification, with None in its place if every "
        "microbatch gets it whole; or pass its tensors in a dict, a dataclass or a named tuple; or give the "
        "microbatches, forward_backward(microbatches=[…])."
    )


def _leaves_outside_lists(tree: _Tree) -> list[_Leaf]:
    lists = {one.path for one in _lists_of(tree)}
    return [leaf for leaf in _leaves_of(tree, lists) if leaf.path not in lists]


def _lists_of(tree: _Tree) -> list[_List]:
    """The outermost lists and tuples of a tree, of which no specification tells; positional arguments are none."""
    places = [] if tree.spec is None else [place for place, _, _ in _specs(tree.spec)]

    def is_list(path: Path, value: Any) -> bool:
        structure = structure_of(value) if path or tree.name == "labels" else None
        return structure is not None and structure.is_sequence

    lists = []
    for path, text, value in leaves_of(tree.value, is_list):
        if not is_list(path, value) or any(path[: len(p)] == p or p[: len(path)] == path for p in places):
            continue
        tensors = [leaf for _, _, leaf in leaves_of(value) if isinstance(leaf, torch.Tensor)]
        sizes = frozenset(leaf.shape[0] for leaf in tensors if leaf.dim() and leaf.shape[0] != 1)
        kinds = {_kind_of(item) for item in value}
        label, is_uniform = tree.full_label(path, text), len(kinds) == 1
        lists.append(_List(label, value, path, tree.option, sizes, bool(tensors), is_uniform))
    return lists


def _kind_of(item: Any) -> tuple[Any, ...]:
    """A key that samples of one batch share."""
    return tuple(
        (text, leaf.dim(), leaf.dtype) if isinstance(leaf, torch.Tensor) else (text, type(leaf))
        for _, text, leaf in leaves_of(item, lambda path, part: bool(path) and isinstance(part, (list, tuple)))
    )


def _leaves_of(tree: _Tree, by_items: Collection[Path]) -> list[_Leaf]:
    """Every leaf of a tree.

    Args:
        tree: the tree.
        by_items: paths of lists that are split by their items.
    """
    specs = _specs(tree.spec)

    def asked_of(path: Path) -> Any:
        return next((spec for place, _, spec in specs if path[: len(place)] == place), _CONVENTION)

    def stops(path: Path, value: Any) -> bool:
        if path in by_items:
            return True
        spec = asked_of(path) if path or tree.name == "labels" else _CONVENTION
        structure = structure_of(value) if spec is not _CONVENTION and _dim(spec) == 0 else None
        return structure is not None and structure.is_sequence and not holds_tensors(value)

    leaves = []
    for path, text, leaf in leaves_of(tree.value, stops):
        asked = asked_of(path)
        label = tree.label(path, text)
        by_convention = 0 if path in by_items or (isinstance(leaf, torch.Tensor) and leaf.dim()) else None
        dim = by_convention if asked is _CONVENTION else _dim(asked)
        is_list = path in by_items or stops(path, leaf)
        if dim is not None and not is_list and (not torch.is_tensor(leaf) or not -leaf.dim() <= dim < leaf.dim()):
            kind = f"tensor of {leaf.dim()} dimensions" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ValueError(f"{label} cannot be split along dimension {dim}: it is a {kind}.")
        leaves.append(_Leaf(label, tree.full_label(path, text), leaf, path, dim, asked is not _CONVENTION))
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
    sizes = Counter(leaf.rows for leaf in split)
    if len(sizes) < 2:
        return leaves
    candidates = [leaf for leaf in split if leaf.specified] or [leaf for leaf in split if leaf.rows != 1]
    batch = candidates[0].rows
    leaves_of_batch = []
    for leaf in leaves:
        if leaf.dim is not None and not leaf.specified:
            size = leaf.rows
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


def _specs(spec: Any) -> list[tuple[Path, str, Any]]:
    """The parts of a specification, with the paths of what they are for; none: by convention."""
    if spec is None:
        return []
    return list(leaves_of(spec, lambda _, item: item is None or _is_spec(item)))


def _spread(spec: Any, value: Any) -> dict[Path, Any]:
    """The spec expanded to every leaf."""
    specs = _specs(spec)
    spread = {}
    for path, _, _ in leaves_of(value) if specs else ():
        above = [item for place, _, item in specs if path[: len(place)] == place]
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
    columns = [leaf.split(count) if count > 1 else [leaf.value] for leaf in leaves]
    return [[column[index] for column in columns] for index in range(count)]
