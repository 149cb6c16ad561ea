"""The microbatches of a step, captured from calls of the compiled model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph, find_read_primals
from roundpipe_fx.pipeline.settings import StepCompileState, StepSetting
from roundpipe_fx.runtime.bridge import capture_call
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram, Source
from roundpipe_fx.schedules import ActionKind


@dataclass(frozen=True, kw_only=True)
class CapturedCalls:
    """Microbatches, ready to run.

    Attributes:
        calls: call the compiled model.
        graphs: what it was compiled to.
        programs: what each microbatch runs.
        primals: the inputs of the compiled graph.
    """

    calls: Sequence[Callable[[], Any]]
    graphs: list[PipelinedGraph]
    programs: list[PipelineProgram]
    primals: list[list[Any]]


class UnlikeStagesError(ValueError):
    """Microbatches of one step were cut into different stages."""


def capture_calls(
    calls: Sequence[Callable[[], Any]], compile_state: StepCompileState, setting: StepSetting
) -> CapturedCalls:
    """Capture each microbatch; those of other shapes are cut like the first.

    Args:
        calls: call the compiled model, one per microbatch.
        compile_state: shared with the compilations of the step.
        setting: what they are to know of the step.

    Raises:
        UnlikeStagesError: they were cut into different stages all the same, as those of which an earlier step compiled
            one by itself.
    """
    graphs: list[PipelinedGraph] = []
    primals = []
    gradients = torch.is_grad_enabled()
    # The first microbatch decides where the graph is cut. All others are cut at the same operations, whatever their
    # shapes.
    structure = setting.structure or compile_state.kept.get(gradients)
    for call in calls:
        compile_state.step = dataclasses.replace(setting, structure=structure)
        graph, arguments = capture_call(call)
        graphs.append(graph)
        primals.append(arguments)
        structure = graphs[0].pipeline.structure
        if graph is not graphs[0] and not _is_cut_alike(graphs[0], graph):
            # Remembered, so that the next step cuts every graph alike from the beginning.
            compile_state.kept[gradients] = structure
            raise UnlikeStagesError(
                "microbatches of different shapes were cut into different stages, so no schedule fits both: use a "
                "batch size that is divisible by num_microbatches."
            )
    # The last microbatch's variant differs with checkpoint="except_last" only.
    programs = [graph.main for graph in graphs[:-1]] + [graphs[-1].last]
    return CapturedCalls(calls=calls, graphs=graphs, programs=programs, primals=primals)


def check_unchanged(captured: CapturedCalls, index: int, graph: PipelinedGraph, arguments: Sequence[Any]) -> None:
    """All microbatches are captured before the first one runs: none may change Python state that a later one reads.

    Args:
        index: of one of them.
        graph: what it is compiled to now that the results of those before it were returned.

    Raises:
        RuntimeError: it would compute something else.
    """
    before, arguments_now = captured.graphs[index], captured.primals[index]
    # Several graphs for different sizes may fit a microbatch, and Dynamo may use any of them.
    known = any(graph is other for other in captured.graphs)
    same = known or any(_work_key(graph) == _work_key(other) for other in captured.graphs)
    inputs = ((graph.numbers, before.numbers, _is_same_number), (graph.tensors, before.tensors, _is_same_tensor))
    for positions, others, alike in inputs:
        if len(positions) == len(others):  # a graph for a single size has no inputs for sizes
            same = same and all(map(alike, [arguments[p] for p in positions], [arguments_now[p] for p in others]))
    if not same:
        raise RuntimeError(
            f"microbatch {index} does not compute what it did when the step began: the model keeps something in Python "
            "(an attribute, a global) that the microbatches before it have changed. A pipeline calls the model for all "
            "microbatches before any of them runs, so what one hands on to the next must be a buffer, and be updated "
            "in place."
        )


def _is_same_tensor(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Test for the same tensor: one that is updated in place stays the same, a newly assigned one does not."""
    return now is then or now.is_set_to(then)


def _is_same_number(now: Any, then: Any) -> bool:
    """Return whether two numbers are the same, tensors or not."""
    now, then = (value.item() if isinstance(value, torch.Tensor) else value for value in (now, then))
    return bool(now == then or (now != now and then != then))


def _work_key(graph: PipelinedGraph) -> list[Any]:
    """A key that is equal for graphs that compute the same; one may have more inputs, which it does not read."""
    # Numbers among the inputs that are read: Dynamo may pass inputs that a graph ignores, and two graphs may differ in
    # these.
    primals = {position: index for index, position in enumerate(find_read_primals((graph.main, graph.last)))}
    works = []
    for variant, program in ((graph.pipeline.main, graph.main), (graph.pipeline.last, graph.last)):
        gradients = [position for position, gradient in enumerate(program.gradients) if gradient.source is not None]
        numbers = {"primal": primals, "sum": {position: index for index, position in enumerate(gradients)}}
        # Equal fingerprints, equal wiring, equal outputs and equal updates: the same computation.
        sources = {
            step: [_renumber_source(source, numbers) for source in code.inputs] for step, code in program.steps.items()
        }
        works.append(
            (
                {step: module.fingerprint for step, module in variant.steps.modules.items()},
                {step: (sources[step], code.outputs) for step, code in program.steps.items()},
                [_renumber_source(source, numbers) for source in program.outputs],
                [
                    (primals[gradient.primal], gradient.source)
                    for gradient in map(program.gradients.__getitem__, gradients)
                ],
                {position: primals[input_position] for position, input_position in program.mutations.items()},
            )
        )
    return works


def _renumber_source(source: Source | None, numbers: dict[str, dict[int, int]]) -> Source | None:
    """A source with the number that its index has among those of its kind."""
    if source is None or source.kind not in numbers:
        return source
    return Source(source.kind, numbers[source.kind][source.index])


def _is_cut_alike(first: PipelinedGraph, other: PipelinedGraph) -> bool:
    """Return whether microbatches have the same stages: one schedule runs them all."""
    # In a backward a stage may have nothing to do for one shape: a sum over a single row is no operation.
    forwards, others = ({s for s in g.main.steps if s[0] is ActionKind.FORWARD} for g in (first, other))
    return forwards == others


@dataclass(frozen=True)
class TracedStep:
    """A step that was traced and did not run.

    Attributes:
        args: for the model, of the first microbatch.
        kwargs: for the model, of the first microbatch.
        labels: for the loss function, of the first microbatch.
    """

    captured: CapturedCalls
    instructions: Sequence[Sequence[Instruction]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    labels: Any = None
