"""Batch leaves: which parts of a batch are split, and along which dimension.

By convention a tensor has a row for each sample. A list may have an item for each sample instead. Which of the two it
is follows from the number of its items and the first sizes of its tensors, compared with the batch's rows. The rows are
those of the first tensor outside of lists that has more than one, else of the labels, else of the lists themselves::

    with 7 rows                                    items are samples    tensors have rows
    7 images of 3 channels                         yes                  no                     split by items
    2 tensors of 7 rows                            no                   yes                    each is split
    7 tensors of 7 rows                            yes                  yes                    refused
    2 tensors of 3 and 5 rows                      no                   no                     refused
    7 strings                                      yes                  no tensors             refused
    3 strings                                      no                   no tensors             the same for each
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_fx.pipeline.batches.structures import (
    BY_CONVENTION,
    Path,
    holds_tensors,
    iterate_leaves,
    open_container,
    parse_specs,
    parse_split_dim,
)


@dataclass(frozen=True)
class BatchTree:
    """A value that is split.

    Attributes:
        spec: how; ``None``: by convention.
        name: ``"args"`` or ``"labels"``; ``""``: keyword arguments.
        option: by which a user says how.
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


def trees_of_inputs(args: Any, kwargs: Any, spec: Any, names: Sequence[str] = ()) -> list[BatchTree]:
    """Positional and keyword inputs as what is split.

    Args:
        spec: (specs of args, specs of kwargs); ``None``: by convention.
    """
    args_spec, kwargs_spec = (None, None) if spec is None else spec
    return [BatchTree(args, args_spec, "args", SPLIT_INPUT, names), BatchTree(kwargs, kwargs_spec, "", SPLIT_INPUT)]


@dataclass(frozen=True, kw_only=True)
class BatchLeaf:
    """A leaf of the tree that is split.

    Attributes:
        label: its name for the user.
        full_label: the same, with the name of a positional argument.
        value: it; of a list that is split by its items, all of it.
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
        structure = open_container(self.value)
        assert structure is not None
        # As `tensor_split` does it: 7 items for 3 microbatches are 3, 2, 2.
        fewer, larger = divmod(len(self.value), count)
        ends = itertools.accumulate((fewer + (index < larger) for index in range(count)), initial=0)
        return [structure.rebuild(structure.parts[start:end]) for start, end in itertools.pairwise(ends)]


SPLIT_INPUT = "split_input=(specs of args, specs of kwargs)"
SPLIT_LABEL = "split_label=a spec"


@dataclass(frozen=True, kw_only=True)
class _ListInBatch:
    """A list or tuple among inputs or labels, whose items may be samples.

    Attributes:
        label: its name for the user.
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
        """Return whether there may be an item for each sample, of several."""
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


def find_batch_leaves(trees: Sequence[BatchTree], others: Sequence[BatchTree]) -> list[list[BatchLeaf]]:
    """Every leaf of each tree, with how it is split.

    Args:
        others: what else the batch has, which may tell how many samples there are.

    Raises:
        ValueError: a list may have an item for each sample or not.
        TypeError: an object holds tensors, and nothing tells how to split it.
    """
    # The batch's size comes from tensors outside lists first, since these are split by convention; then from those of
    # the other side (labels for inputs); then from the lists.
    free = [leaf for tree in trees for leaf in _find_leaves_outside_lists(tree)]
    lists = [(tree, one) for tree in trees for one in _find_outermost_lists(tree)]
    by_items: dict[int, set[Path]] = {id(tree): set() for tree in trees}
    with_tensors = [one for _, one in lists if one.has_tensors]
    batch = _rows_of_batch(free)
    if batch is None and lists:
        batch = _rows_of_batch([leaf for tree in others for leaf in _find_leaves_outside_lists(tree)])
    if batch is None and with_tensors:
        every = [*with_tensors, *(one for tree in others for one in _find_outermost_lists(tree) if one.has_tensors)]
        batch = _rows_of_lists(every)
    for tree, one in lists:
        # Four cases of a list with tensors: items are samples, tensors have rows, both (ambiguous, refused), neither
        # (refused, unless its tensors have no size to compare).
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
    leaves = [_find_leaves(tree, by_items[id(tree)]) for tree in trees]
    for tree, of_tree in zip(trees, leaves, strict=True):
        for leaf in of_tree:
            if not leaf.specified and leaf.dim is None and not isinstance(leaf.value, torch.Tensor):
                _refuse_object(leaf, tree.option)
    return leaves


def _rows_of_batch(leaves: Sequence[BatchLeaf]) -> int | None:
    """The batch's size by tensors that are no items of lists; ``None``: they do not tell."""
    split = [leaf for leaf in leaves if leaf.dim is not None]
    # A size of 1 broadcasts over any batch, so it says nothing.
    candidates = [leaf for leaf in split if leaf.specified] or [leaf for leaf in split if leaf.rows != 1]
    return candidates[0].rows if candidates else None


def _rows_of_lists(lists: Sequence[_ListInBatch]) -> int:
    """The batch's size where all that it has are lists.

    Raises:
        ValueError: items may be samples or not.
    """
    rows, samples = {one.rows for one in lists if one.sizes}, len(lists[0].value)
    have_rows = len(rows) == 1 and None not in rows
    are_samples = all(one.has_item_for_each_of(samples) for one in lists)
    # Exactly one reading has to fit: tensors of one common size, or items of one kind for each sample.
    if have_rows == are_samples:
        raise lists[0].refused(None)
    return samples if are_samples else next(size for size in rows if size is not None)


def _refuse_object(leaf: BatchLeaf, option: str) -> None:
    """Refuse an object whose tensors may belong to the batch, or an iterator, which the first microbatch would empty.

    Raises:
        TypeError: it is one.
    """
    value = leaf.value
    if isinstance(value, nn.Module) or not (isinstance(value, Iterator) or holds_tensors(value)):
        return
    name = option.partition("=")[0]
    kind = "an object that holds tensors or arrays"
    why = "roundpipe_fx does not know which of them have a row for each sample"
    if isinstance(value, Iterator):
        kind, why = "an iterator", "the first microbatch would leave nothing for the others"
    function = "(args, kwargs, count) -> (list of args, list of kwargs)"
    if option is SPLIT_LABEL:
        function = "(labels, count) -> list of labels"
    raise TypeError(
        f"{leaf.full_label} is {kind}, {type(value).__name__}, and {why}. Give {name}=a function, {function}, or a "
        "specification, with None in its place if every microbatch gets it whole; or pass its tensors in a dict, a "
        "dataclass or a named tuple; or give the microbatches, forward_backward(microbatches=[…])."
    )


def _find_leaves_outside_lists(tree: BatchTree) -> list[BatchLeaf]:
    lists = {one.path for one in _find_outermost_lists(tree)}
    return [leaf for leaf in _find_leaves(tree, lists) if leaf.path not in lists]


def _find_outermost_lists(tree: BatchTree) -> list[_ListInBatch]:
    """The outermost lists and tuples of a tree, of which no specification tells; positional arguments are none."""
    prefixes = [] if tree.spec is None else [prefix for prefix, _, _ in parse_specs(tree.spec)]

    def is_list(path: Path, value: Any) -> bool:
        structure = open_container(value) if path or tree.name == "labels" else None
        return structure is not None and structure.is_sequence

    lists = []
    for path, text, value in iterate_leaves(tree.value, is_list):
        # A specification above or below this list decides instead.
        if not is_list(path, value) or any(path[: len(p)] == p or p[: len(path)] == path for p in prefixes):
            continue
        tensors = [leaf for _, _, leaf in iterate_leaves(value) if isinstance(leaf, torch.Tensor)]
        # Sizes of 1 broadcast and are left out, as above.
        sizes = frozenset(leaf.shape[0] for leaf in tensors if leaf.dim() and leaf.shape[0] != 1)
        kinds = {_sample_key(item) for item in value}
        label, is_uniform = tree.full_label(path, text), len(kinds) == 1
        lists.append(
            _ListInBatch(
                label=label,
                value=value,
                path=path,
                option=tree.option,
                sizes=sizes,
                has_tensors=bool(tensors),
                is_uniform=is_uniform,
            )
        )
    return lists


def _sample_key(item: Any) -> tuple[Any, ...]:
    """A key that samples of one batch share."""
    return tuple(
        (text, leaf.dim(), leaf.dtype) if isinstance(leaf, torch.Tensor) else (text, type(leaf))
        for _, text, leaf in iterate_leaves(item, lambda path, part: bool(path) and isinstance(part, (list, tuple)))
    )


def _find_leaves(tree: BatchTree, by_items: Collection[Path]) -> list[BatchLeaf]:
    """Every leaf of a tree.

    Args:
        by_items: paths of lists that are split by their items.
    """
    specs = parse_specs(tree.spec)

    def asked_of(path: Path) -> Any:
        return next((spec for prefix, _, spec in specs if path[: len(prefix)] == prefix), BY_CONVENTION)

    def stops(path: Path, value: Any) -> bool:
        if path in by_items:
            return True
        # A list for which dimension 0 is specified, and which holds no tensors (strings), is split as it is, by its
        # items.
        spec = asked_of(path) if path or tree.name == "labels" else BY_CONVENTION
        structure = open_container(value) if spec is not BY_CONVENTION and parse_split_dim(spec) == 0 else None
        return structure is not None and structure.is_sequence and not holds_tensors(value)

    leaves = []
    for path, text, leaf in iterate_leaves(tree.value, stops):
        asked = asked_of(path)
        label = tree.label(path, text)
        by_convention = 0 if path in by_items or (isinstance(leaf, torch.Tensor) and leaf.dim()) else None
        dim = by_convention if asked is BY_CONVENTION else parse_split_dim(asked)
        is_list = path in by_items or stops(path, leaf)
        if dim is not None and not is_list and (not torch.is_tensor(leaf) or not -leaf.dim() <= dim < leaf.dim()):
            kind = f"tensor of {leaf.dim()} dimensions" if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            raise ValueError(f"{label} cannot be split along dimension {dim}: it is a {kind}.")
        leaves.append(
            BatchLeaf(
                label=label,
                full_label=tree.full_label(path, text),
                value=leaf,
                path=path,
                dim=dim,
                specified=asked is not BY_CONVENTION,
            )
        )
    # A specification that matches nothing is a mistake of the user's. Only within present branches: optional inputs may
    # be missing.
    present = {leaf.path[:1] for leaf in leaves}
    for prefix, text, _ in specs:
        if len(prefix) > 1 and prefix[:1] in present and not any(leaf.path[: len(prefix)] == prefix for leaf in leaves):
            raise ValueError(
                f"{tree.option}: a specification is for {tree.label(prefix, text)}, but there is no such part. Fields "
                "of dataclasses and named tuples are specified by name, as {'x': 0}."
            )
    return leaves


def keep_unmatched_inputs_whole(leaves: list[BatchLeaf], warn: bool = False) -> list[BatchLeaf]:
    """By convention an input whose size differs from the batch's, and that no other input shares, is the same for each.

    The batch's size is that of the inputs that are specified to be split, or of the first input that has more than one
    row. Sizes that several inputs share are a mistake, which :func:`check_batch_sizes` reports.

    Args:
        warn: whether to warn if only the order of the inputs determines which one is the batch.
    """
    split = [leaf for leaf in leaves if leaf.dim is not None]
    sizes = Counter(leaf.rows for leaf in split)
    if len(sizes) < 2:
        return leaves
    # The first leaf that tells decides the batch's size: a specified one, else one with more than a single row.
    candidates = [leaf for leaf in split if leaf.specified] or [leaf for leaf in split if leaf.rows != 1]
    batch = candidates[0].rows
    leaves_of_batch = []
    for leaf in leaves:
        if leaf.dim is not None and not leaf.specified:
            size = leaf.rows
            # Size 1 broadcasts. Another size that no second input shares is a constant (a table of positions), with a
            # warning where the two readings are equally likely.
            if size != batch and (size == 1 or sizes[size] == 1):
                if warn and size != 1 and sizes[batch] == 1 and not candidates[0].specified:
                    warnings.warn(
                        f"roundpipe_fx: {candidates[0].label} has {batch} rows and {leaf.label} {size}; the first is "
                        f"taken to be the batch, and {leaf.label} is the same for every microbatch. {SPLIT_INPUT} says "
                        "what is split.",
                        stacklevel=5,
                    )
                leaf = dataclasses.replace(leaf, dim=None)
        leaves_of_batch.append(leaf)
    return leaves_of_batch
