"""The microbatches of a step, taken from the compiled model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundpipe_fx import torch_private
from roundpipe_fx.pipeline.graph import PipelinedGraph
from roundpipe_fx.pipeline.settings import Likeness
from roundpipe_fx.runtime.pipeline_program import PipelineProgram
from roundpipe_fx.runtime.pipelined_calls import take
from roundpipe_fx.schedules import Kind

__all__ = ["Taken", "take_all"]


@dataclass(frozen=True)
class Taken:
    """Microbatches, ready to run.

    Attributes:
        calls: call the compiled model.
        graphs: what it was compiled to.
        programs: what each microbatch runs.
        primals: the inputs of the compiled graph.
    """

    calls: list[Callable[[], Any]]
    graphs: list[PipelinedGraph]
    programs: list[PipelineProgram]
    primals: list[list[Any]]


def take_all(calls: list[Callable[[], Any]], likeness: Likeness, in_halves: bool) -> Taken:
    """Take each microbatch; those of other shapes are cut like the first.

    Args:
        calls: call the compiled model, one a microbatch.
        likeness: shared with what compiles it.
        in_halves: whether all forwards are to run before all backwards.

    Raises:
        ValueError: they were cut into different stages all the same.
    """
    graphs: list[PipelinedGraph] = []
    primals = []
    likeness.structure, likeness.in_halves = None, in_halves
    with torch_private.dynamo_flags():
        for call in calls:
            graph, arguments = take(call)
            graphs.append(graph)
            primals.append(arguments)
            likeness.structure = graphs[0].pipeline.structure
            _check_alike(graphs[0], graph)
    programs = [graph.main for graph in graphs[:-1]] + [graphs[-1].last]
    return Taken(calls, graphs, programs, primals)


def _check_alike(first: PipelinedGraph, other: PipelinedGraph) -> None:
    """Microbatches of different shapes must have the same stages, since one schedule runs them all."""
    if other is first:
        return
    own, others = ({s for s in g.main.steps if s[0] is not Kind.RECOMPUTE} for g in (first, other))
    if own != others:
        raise ValueError(
            "microbatches of different shapes were cut into different stages, so no schedule fits both: use a batch "
            "size that is divisible by num_microbatches."
        )
