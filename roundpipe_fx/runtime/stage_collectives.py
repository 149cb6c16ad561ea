"""Stage collectives: those of a stage module's graph, which all ranks that share the stage run in one order.

If a stage raises on one rank, the others wait for it in a collective. So it goes through those that it has not started
yet with zeros, which nobody uses, and the others come to the end of the stage::

    rank 2   all_reduce   ✗ raises   all_reduce of zeros   all_reduce of zeros   │ the run has failed
    rank 3   all_reduce   ────────   all_reduce            all_reduce            │ the run has failed
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.collectives import starts_collective
from roundpipe_fx.torch_private import tree_leaves, wait_for_collective

__all__ = ["Collective", "begin_stage", "collectives_of", "counted", "started"]

Collective = Callable[[], None]
"""Runs a collective on zeros, and waits for it."""


class _Progress(threading.local):
    started = 0


_progress = _Progress()


def begin_stage() -> None:
    """The worker in this thread begins a stage: it has started none of its collectives."""
    _progress.started = 0


def started() -> int:
    """How many collectives of its stage the worker in this thread has started."""
    return _progress.started


@functools.cache
def counted(target: Callable[..., Any]) -> Callable[..., Any]:
    """The same operator, whose calls are counted as started collectives."""

    def call(*arguments: Any, **options: Any) -> Any:
        result = target(*arguments, **options)
        _progress.started += 1
        return result

    return call


def collectives_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """The collectives of a stage module, in order; none if one of them reads anything but tensors of known sizes."""
    nodes = [node for node in graph.nodes if starts_collective(node.target)]
    if not all(_is_known(source.meta.get("val")) for node in nodes for source in node.all_input_nodes):
        return ()
    return tuple(functools.partial(_run, node) for node in nodes)


def _is_known(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


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
