"""Results: outputs that every rank gets, and gradients of tensors that several ranks use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.distributed.averaging import Averaging
from roundpipe_fx.distributed.group import PipelineGroup
from roundpipe_fx.distributed.layout import ValueLayout, count, dense, numbers_of, received, strided

__all__ = ["shared_value", "sum_gradients"]

_RESULTS = 3
"""The channel of gradients that are summed over ranks."""


def shared_value(group: PipelineGroup, value: Any, layout: ValueLayout, root: int) -> Any:
    """A rank's value on every rank. Every rank must call it; only the root's ``value`` is read."""
    mine = group.rank == root
    numbers = numbers_of([value], [layout]) if mine else [0] * layout.numbers
    if numbers:
        travelling = torch.tensor(numbers)
        group.share_tensor(travelling, root)
        numbers = travelling.tolist()
    (known,) = received([layout], numbers)
    if layout.kind != "tensor":
        return known
    if mine:
        body = dense(value, *known)
    else:
        device = group.device if layout.device != "cpu" else "cpu"
        body = torch.empty(count(*known), dtype=layout.dtype, device=device)
    if body.numel():
        group.share_tensor(body, root)
    return value if mine else strided(body, *known)


def sum_gradients(
    group: PipelineGroup,
    gradients: dict[int, torch.Tensor],
    shared: Sequence[tuple[int, Mapping[int, ValueLayout], frozenset[int]]],
    averaging: Averaging | None = None,
) -> None:
    """Sum the gradients of tensors that several ranks use, in the order of ranks, so that each gets the same bits.

    Args:
        group: the ranks.
        gradients: this rank's, by identity of the tensor; changed.
        shared: in the same order on all ranks, for each such tensor: its identity here; the ranks that have computed a
            gradient, with its layout; the ranks that get the sum.
        averaging: over replicas of the pipeline; ``None``: there are none, or not in this step.
    """
    for key, computed, owners in shared:
        root = min(computed)
        gradient = gradients.pop(key, None)
        if group.rank == root:
            assert gradient is not None
            total = gradient
            del gradient  # so that no more than two others are there beside it, however many ranks add to it
            for rank in sorted(computed.keys() - {root}):
                total = total + _receive(group, computed[rank], rank)
            if averaging is not None and key in averaging.over_ranks:
                total = averaging.mean(key, total)
            for rank in sorted(owners - {root}):
                _send(group, total, _layout_of_sum(key, computed[root], averaging), rank)
            if root in owners:
                gradients[key] = total
            continue
        if group.rank in computed:
            assert gradient is not None
            _send(group, gradient, computed[group.rank], root)
        if group.rank in owners:
            gradients[key] = _receive(group, _layout_of_sum(key, computed[root], averaging), root)


def _layout_of_sum(key: int, computed: ValueLayout, averaging: Averaging | None) -> ValueLayout:
    """The layout of a sum as its owners get it: of a sharded parameter, the rows of this replica."""
    if averaging is None or key not in averaging.sharded or key not in averaging.over_ranks:
        return computed
    return ValueLayout.of(averaging.sharded[key].local())


def _send(group: PipelineGroup, value: torch.Tensor, layout: ValueLayout, target: int) -> None:
    shape, stride = layout.shape or tuple(value.shape), layout.stride or tuple(value.stride())
    if layout.shape is None:
        group.start_send(torch.tensor([*shape, *stride]), target, _RESULTS).wait()
    body = dense(value, shape, stride)
    if body.numel():
        group.start_send(body, target, _RESULTS).wait()


def _receive(group: PipelineGroup, layout: ValueLayout, source: int) -> torch.Tensor:
    shape, stride = layout.shape, layout.stride
    if shape is None or stride is None:
        sizes = torch.empty(2 * layout.dims, dtype=torch.int64)
        group.start_receive(sizes, source, _RESULTS).wait()
        numbers = sizes.tolist()
        shape, stride = tuple(numbers[: layout.dims]), tuple(numbers[layout.dims :])
    body = torch.empty(count(shape, stride), dtype=layout.dtype, device=group.device)
    if body.numel():
        group.start_receive(body, source, _RESULTS).wait()
    return strided(body, shape, stride)
