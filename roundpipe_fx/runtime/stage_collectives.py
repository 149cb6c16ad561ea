"""Stage collectives: those of a stage module's graph, which all ranks that share the stage run in one order.

If a stage raises on one rank, the others wait for it in a collective. So it goes through those that it has not started
yet with zeros, which nobody uses, and the others come to the end of the stage::

    rank 2   all_reduce   ✗ raises   all_reduce of zeros   all_reduce of zeros   │ the run has failed
    rank 3   all_reduce   ────────   all_reduce            all_reduce            │ the run has failed

If sizes of what a collective reads depend on data, a rank that has failed does not know them. Such a collective follows
a vote: an ``all_reduce`` of one number, whether a rank has failed. If so, none of the group's ranks runs the
collective, and those that had not failed stop there::

    rank 2   ✗ raises   vote: failed      │ not run   all_reduce of zeros   │ the run has failed
    rank 3   ────────   vote: not failed  │ stops     all_reduce of zeros   │ the run has failed
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.collectives import group_argument, starts_collective
from roundpipe_fx.runtime.worker import Stopped
from roundpipe_fx.torch_private import largest_of_group, tree_leaves, wait_for_collective

Collective = Callable[[], None]
"""Runs a collective on zeros, or votes that this rank has failed, and waits for it."""


class _Progress(threading.local):
    started = 0
    voting = False


_progress = _Progress()


def begin_stage() -> None:
    """The worker in this thread begins a stage, shared with ranks that may fail: it has started no collective of it."""
    _progress.started, _progress.voting = 0, True


def count_started() -> int:
    """Number of collectives of its stage that the worker in this thread has started."""
    return _progress.started


def count_calls(node: fx.Node) -> Callable[..., Any]:
    """The operator of a collective, whose calls are counted as started, and follow a vote if sizes depend on data.

    It raises ``Stopped`` if a rank has voted that it failed.
    """
    assert callable(node.target)
    return _count_calls(node.target, not _is_known(node))


@functools.cache
def _count_calls(target: Callable[..., Any], votes: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        # At a collective of unknown sizes all ranks vote first; where sizes are known a failed rank takes part with
        # zeros.
        if votes and _progress.voting:
            group, value = group_argument(target, arguments, options), _first_tensor(arguments)
            if group is not None and _vote(False, group, value.device):
                _progress.started += 1
                raise Stopped
        # Counted after it was started: if it raises itself, it is run once more with zeros.
        result = target(*arguments, **options)
        _progress.started += 1
        return result

    return call


def collectives_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """The collectives of a stage module, in order; none if sizes of one depend on data and its group has no name."""
    nodes = [node for node in graph.nodes if starts_collective(node.target)]
    # Without the group there is nobody to vote with, so such a graph cannot go through its collectives.
    if any(not _is_known(node) and group_argument(node.target, node.args, node.kwargs) is None for node in nodes):
        return ()
    return tuple(functools.partial(_run if _is_known(node) else _fail, node) for node in nodes)


def _is_known(node: fx.Node) -> bool:
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return all(isinstance(v, torch.Tensor) and all(isinstance(size, int) for size in v.shape) for v in values)


@torch.no_grad()
def _run(node: fx.Node) -> None:
    assert callable(node.target)
    arguments, options = fx.node.map_arg((node.args, node.kwargs), _zeros)
    for result in tree_leaves(node.target(*arguments, **options)):
        if isinstance(result, torch.Tensor):
            wait_for_collective(result)


def _zeros(node: fx.Node) -> torch.Tensor:
    value = node.meta["val"]
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def _fail(node: fx.Node) -> None:
    group = group_argument(node.target, node.args, node.kwargs)
    values = [source.meta.get("val") for source in node.all_input_nodes]
    _vote(True, group, _first_tensor(values).device)


@torch.no_grad()
def _vote(failed: bool, group: Any, device: torch.device) -> bool:
    """Return whether any rank of a group votes that it has failed."""
    vote = torch.full((1,), int(failed), dtype=torch.int32, device=device)
    return bool(largest_of_group(vote, group).item())


def _first_tensor(values: Any) -> torch.Tensor:
    return next(value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
