"""Inputs that share memory, one of which is written.

A traced graph is right for the way in which its inputs shared memory when it was traced: neither Dynamo nor AOTAutograd
guards on that. So calls whose inputs share it in another way are run eagerly, and the user is told. The same is done
where AOTAutograd cannot trace such inputs, or is wrong: where a graph returns a view of one of them. With a buffer of 8
elements, whose first half the model writes::

    inputs                                    traced as                  a later call
    buffer[:4], written, and buffer[2:6]      sharing, layouts noted     runs if its inputs overlap in the same way,
                                                                         else eagerly, with a warning
    the same, nothing written                 separate                   runs in any case
    buffer[:4], written, and other memory     separate                   runs while it is separate
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.torch_private import PassedThrough


class SharedMemoryError(PassedThrough, ValueError):
    """A pipeline got inputs that share memory, one of which the model writes."""


@dataclass(frozen=True)
class SharedInputs:
    """Inputs of a graph that share memory.

    Attributes:
        groups: for each memory, the inputs' numbers.
        layouts: for each input, its sizes, strides and offset, and those of the tensor that it is a view of.
    """

    groups: tuple[tuple[int, ...], ...]
    layouts: tuple[Any, ...]


def shared_inputs(
    inputs: Sequence[Any], among: Collection[int] | None = None, written: Collection[int] | None = None
) -> SharedInputs:
    """The inputs that overlap others in memory.

    Args:
        among: numbers of those that are looked at; ``None``: all.
        written: numbers of those that the graph writes; ``None``: perhaps all.
    """
    by_storage: dict[int, list[int]] = {}
    for position in range(len(inputs)) if among is None else among:
        storage = _storage_id(inputs[position])
        if storage is not None:
            by_storage.setdefault(storage, []).append(position)
    groups = tuple(
        tuple(sorted(positions))
        for positions in by_storage.values()
        if len(positions) > 1
        and _do_overlap([(inputs[position], written is None or position in written) for position in positions])
    )
    return SharedInputs(groups, tuple(_layout(inputs[position]) for group in groups for position in group))


def _storage_id(value: Any) -> int | None:
    """The memory of a tensor; ``None`` if it has none of its own, as inside a transform of ``torch.func``."""
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def _do_overlap(tensors: Sequence[tuple[torch.Tensor, bool]]) -> bool:
    """Return whether the memory between the first and the last element of a written tensor is another's too."""
    # Two reads never conflict: one of the two has to be written to.
    for (first, writes_first), (second, writes_second) in itertools.combinations(tensors, 2):
        if (writes_first or writes_second) and _do_extents_overlap(first, second):
            return True
    return False


def _do_extents_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    (begin, end), (second_begin, second_end) = _extent(first), _extent(second)
    return bool(begin < second_end and second_begin < end)


def _extent(value: torch.Tensor) -> tuple[Any, Any]:
    begin = value.storage_offset() * value.itemsize
    # Bytes from the first to behind the last element; strided elements in between count as covered.
    if value.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return begin, begin + (last + 1) * value.itemsize


def _layout(value: torch.Tensor) -> Any:
    base = value._base
    return (
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        None if base is None else (tuple(base.shape), base.stride(), base.storage_offset()),
    )


def shared_outputs(module: fx.GraphModule, shared: SharedInputs) -> bool:
    """Return whether a graph of Dynamo's returns a view of an input that shares memory with another one.

    Args:
        shared: the inputs that share memory.
    """
    fakes = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
    memories = {_storage_id(fakes[position]) for position in itertools.chain(*shared.groups)}
    values = [node.meta.get("example_value") for node in module.graph.output_node().all_input_nodes]
    return any(_storage_id(value) in memories for value in values)


def separate_memory(module: fx.GraphModule, inputs: Sequence[Any], shared: SharedInputs) -> list[Any]:
    """Inputs to trace a graph of Dynamo's with, fake where they would share memory."""
    separate = list(inputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    for position in itertools.chain(*shared.groups):
        # A fake tensor of the same layout in memory of its own, which requires a gradient in the same way.
        value = placeholders[position].meta["example_value"]
        with value.fake_mode:
            fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            fresh.requires_grad_(value.requires_grad)
            if value.requires_grad and not value.is_leaf:
                with torch.enable_grad():
                    fresh = fresh.clone()
        separate[position] = fresh
    return separate


def run_if_shared_as_traced(
    run: Callable[..., Any],
    eagerly: Callable[..., Any] | None,
    traced: Sequence[Any],
    written: Collection[int],
    labels: Sequence[tuple[str, bool]],
) -> Callable[..., Any]:
    """A compiled graph that runs calls eagerly whose inputs share memory in another way than when it was traced.

    Parameters and buffers are taken to share memory among themselves as they did then.

    Args:
        eagerly: the same graph, run by eager PyTorch; ``None``: such calls are refused.
        traced: the inputs for which it was traced.
        written: numbers of the inputs that it writes.
        labels: for each input its path, and whether it is a parameter or a buffer.
    """
    user_inputs = {position for position, (_, is_part_of_model) in enumerate(labels) if not is_part_of_model}
    # Parameters share memory among themselves as they did when traced; only what the user passes, and what is written,
    # is compared.
    among = sorted(range(len(traced)) if user_inputs & set(written) else user_inputs | set(written))
    if not written:
        return run
    expected = shared_inputs(traced, among, written)
    warned = False

    def run_or_eagerly(*arguments: Any) -> Any:
        nonlocal warned
        current = shared_inputs(arguments, among, written)
        if current == expected:
            return run(*arguments)
        if eagerly is None:
            raise SharedMemoryError(f"{_describe_overlap(current, expected, written, labels)} {_REFUSED}")
        if not warned:
            warned = True
            warnings.warn(
                f"roundpipe_fx: {_describe_overlap(current, expected, written, labels)} {_EAGER}", stacklevel=2
            )
        return eagerly(*arguments)

    return run_or_eagerly


_ADVICE = "Pass copies (`tensor.clone()`), or let the model write to a copy."
_EAGER = f"Calls with such inputs run eagerly, which is right, but no memory_budget bounds them. {_ADVICE}"
_REFUSED = f"A pipeline cannot run them. {_ADVICE}"


def _describe_overlap(
    current: SharedInputs, expected: SharedInputs, written: Collection[int], labels: Sequence[tuple[str, bool]]
) -> str:
    if not current.groups:
        names = _join_names(expected.groups[0], labels)
        return f"the model was compiled for inputs that share memory ({names}) and now gets some that do not."
    group = next((group for group in current.groups if group not in expected.groups), current.groups[0])
    names = _join_names(group, labels)
    return f"{names} share memory, and the model writes to {_join_names([p for p in group if p in written], labels)}."


def _join_names(positions: Sequence[int], labels: Sequence[tuple[str, bool]]) -> str:
    names = [repr(labels[position][0]) for position in positions]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
