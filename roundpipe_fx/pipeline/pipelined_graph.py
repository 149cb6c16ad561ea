"""A pipelined graph: lowered and compiled for microbatches of one shape.

A compiled module knows nothing of where its arguments come from: each has a source, and each result has a number. So
stages with equal modules are compiled once. For ``(tanh(x @ w0.T) @ w1.T).sum()`` with primals w0, x and w1, cut behind
the tanh::

    action   arguments                              results
    F0       primal 0, primal 1                     value 0: the tanh
    F1       primal 2, value 0                      value 1: the loss, which is output 0
    B1       primal 2, tangent 0, sum 2, value 0    value 2: sum 2 and the gradient of w1; value 3: that of value 0
    B0       primal 1, sum 0, value 0, value 3      value 4: sum 0 and the gradient of w0

Sums and gradients have the number of their primal here. ``sum 2`` is what earlier microbatches have added up to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from roundpipe_fx.codegen import StageModule, moved
from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.ir.decisions import Decisions
from roundpipe_fx.ir.joint_graph import Mark, is_sum, is_tensor, viewed
from roundpipe_fx.ir.options import StageCompiler
from roundpipe_fx.operators.gradient_sums import SUMMING
from roundpipe_fx.pipeline.host_memory import HostMemory, check_host_memory, host_budget_for
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline, Variant
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.runtime import random_streams
from roundpipe_fx.runtime.compiled_parts import compile_in_parts
from roundpipe_fx.runtime.observers import ObserveSize, profile_operators, size_observer
from roundpipe_fx.runtime.pipeline_program import Gradient, PipelineProgram, Source, StepCode
from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.runtime.stage_collectives import collectives_of
from roundpipe_fx.runtime.stage_compiler import COMPILING, Boxed, compile_stage
from roundpipe_fx.runtime.unread_outputs import UnreadOutputs
from roundpipe_fx.schedules import ActionKind, StageAction, StageGraph
from roundpipe_fx.torch_private import is_effect_token

D = TypeVar("D", bound=Decisions)


@dataclass(frozen=True, kw_only=True)
class PipelinedGraph:
    """The compiled programs for microbatches of one shape.

    Attributes:
        main: what most microbatches run.
        last: what the last one runs.
        outputs: fake values of the forward's results, by number.
        tangents: fake values of the incoming gradients.
        strided: by incoming gradient, whether its strides matter even if it is missing and replaced by zeros.
        numbers: inputs that Python's numbers may have become, of those that are read, by number.
        tensors: the other inputs that are read, by number.
        loss_reduction: how the losses of microbatches become the batch's.
        unread: stands in for outputs that the caller is assumed not to read.
        see_dropped: called before a backward with the numbers of the outputs that the caller has dropped.
        measured: when the actions of the latest step ran, for each device; empty before the first.
    """

    pipeline: LoweredPipeline
    main: PipelineProgram
    last: PipelineProgram
    outputs: tuple[Any, ...]
    tangents: tuple[torch.Tensor, ...]
    strided: tuple[bool, ...]
    numbers: tuple[int, ...]
    tensors: tuple[int, ...]
    loss_reduction: str
    unread: UnreadOutputs
    see_dropped: Callable[[frozenset[int]], None]
    measured: list[list[list[Span]]] = field(default_factory=list)


def count_optimizer(plan: D, pipelining: Pipelining) -> D:
    """Add the optimizer's host memory to a plan that was made before the optimizer was known.

    Args:
        pipelining: the user's, with the optimizer.

    Raises:
        HostMemoryError: the host has no memory for it.
    """
    pipeline = plan.pipeline
    if pipeline is None or not plan.training or not pipeline.host_weight_bytes:
        return plan
    memory = pipelining.optimizer
    needed = HostMemory(
        # The optimizer's state was a guess when the plan was made; now that it exists, the host has to hold it too.
        pipeline.host_weight_bytes,
        pipeline.host_gradient_bytes,
        pipeline.host_value_bytes,
        memory.bytes,
    )
    if memory.bytes > memory.allocated:
        check_host_memory(needed, host_budget_for(pipeline.host_weight_bytes, pipelining))
    return dataclasses.replace(plan, pipeline=dataclasses.replace(pipeline, host_optimizer_bytes=memory.bytes))


class StepObservers(NamedTuple):
    """Callbacks for what steps show.

    Attributes:
        size: called with a symbol's name and a size that depends on data.
        workspace: called with an operator's name and the bytes that it allocated internally.
    """

    size: ObserveSize
    workspace: ObserveSize


class OutputObservers(NamedTuple):
    """Callbacks for what the caller does with outputs.

    Attributes:
        read: called with the number of an output that was assumed unread and is read.
        dropped: called before a backward with the numbers of the outputs that were dropped.
    """

    read: Callable[[int], None]
    dropped: Callable[[frozenset[int]], None]


UNOBSERVED = OutputObservers(read=lambda _: None, dropped=lambda _: None)


def compile_pipelined_graph(
    pipeline: LoweredPipeline,
    differentiated: Sequence[int],
    loss_reduction: str,
    seen: StepObservers | None = None,
    outputs: OutputObservers = UNOBSERVED,
) -> PipelinedGraph:
    """Compile the stage modules of a lowered pipeline.

    Args:
        differentiated: the output that each tangent is the gradient of.
        loss_reduction: how the losses of microbatches become the batch's.
        seen: callbacks for what steps show; ``None``: there are none.
        outputs: callbacks for what the caller does with outputs.
    """
    cache: dict[str, _Compiled] = {}
    lowered = pipeline.main.lowered
    main = _program(pipeline.main, differentiated, cache, seen)
    last = main
    # checkpoint="except_last": the last microbatch, whose backward follows at once, recomputes nothing and has programs
    # of its own.
    if pipeline.last is not pipeline.main:
        last = _program(pipeline.last, differentiated, cache, seen)
    results = lowered.forward.results[: lowered.forward.outputs]
    tangents = _find_tangents(lowered)
    numbers, read = _find_number_inputs(lowered), find_read_primals((main, last))
    return PipelinedGraph(
        pipeline=pipeline,
        main=main,
        last=last,
        outputs=tuple(node.meta.get("val") if isinstance(node, fx.Node) else node for node in results),
        tangents=tuple(node.meta["val"] for node in tangents),
        loss_reduction=loss_reduction,
        unread=UnreadOutputs(lowered.joint.unread, outputs.read),
        see_dropped=outputs.dropped,
        strided=tuple(lowered.stage_compiler != "eager" or Mark.STRIDED in node.meta for node in tangents),
        numbers=tuple(position for position in read if position in numbers),
        tensors=tuple(position for position in read if position not in numbers),
    )


def find_read_primals(programs: Sequence[PipelineProgram]) -> list[int]:
    """Inputs that programs read, update or return gradients of."""
    primals: set[int] = set()
    for program in programs:
        # Updates and gradients go to an input even where no stage has it as an argument.
        primals.update(program.mutations.values())
        primals.update(gradient.primal for gradient in program.gradients if gradient.source is not None)
        sources = [*program.outputs, *(source for code in program.steps.values() for source in code.inputs)]
        primals.update(source.index for source in sources if source is not None and source.kind == "primal")
    return sorted(primals)


def _find_number_inputs(lowered: Lowered) -> set[int]:
    """Inputs that may stand for Python numbers: Dynamo passes these as they are, or as tensors on the CPU."""
    of_model = lowered.parameters.union(lowered.updates.values())
    values = {
        position: node.meta.get("val")
        for position, node in enumerate(lowered.forward.inputs)
        if position not in of_model
    }
    return {
        position
        for position, value in values.items()
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and value.device.type == "cpu")
    }


def _find_tangents(lowered: Lowered) -> list[fx.Node]:
    """Incoming gradients: inputs of the backward that the forward does not return, except tokens of effects."""
    if lowered.backward is None:
        return []
    returned = {node for node in lowered.forward.results if isinstance(node, fx.Node)}
    inputs = lowered.backward.inputs
    # A dynamic number may arrive as a Python number or as a tensor on the CPU without dimensions.
    tangents = [node for node in inputs if node not in returned and is_tensor(node) and not is_sum(node)]
    return [node for node in tangents if not is_effect_token(node)]


def _program(
    variant: Variant,
    differentiated: Sequence[int],
    cache: dict[str, _Compiled],
    seen: StepObservers | None,
) -> PipelineProgram:
    lowered = variant.lowered
    # Every node that a step reads has one source: an input of the graph, an incoming gradient, an effect's token, a
    # running sum, or another step's output. Later lines take precedence.
    numbers = {node: index for index, node in enumerate(variant.steps.maker)}
    known = {node: Source("value", number) for node, number in numbers.items()}
    known |= {node: Source("primal", position) for position, node in enumerate(lowered.forward.inputs)}
    outside = set(lowered.forward.inputs)
    known |= {node: Source("tangent", position) for position, node in enumerate(_find_tangents(lowered))}
    backward_inputs = lowered.backward.inputs if lowered.backward is not None else ()
    known |= {
        node: Source("token", 0) for node in backward_inputs if node.op == "placeholder" and is_effect_token(node)
    }
    backward = lowered.backward.results if lowered.backward is not None else ()
    # `add_to(add_to(sum, g1), g2)` is one running sum: the placeholder at the bottom of the chain is what the backward
    # gets for it.
    known |= {
        _sum_before(node): Source("sum", number)
        for number, node in enumerate(backward)
        if isinstance(node, fx.Node) and node.target in SUMMING
    }

    def code(step: StageAction, module: StageModule) -> StepCode:
        # Stage modules with equal fingerprints (twelve equal transformer blocks) are compiled once.
        if module.fingerprint not in cache:
            see_workspace = seen.workspace if seen is not None else None
            cache[module.fingerprint] = _Compiled(module.module, lowered.stage_compiler, see_workspace)
        compiled = cache[module.fingerprint]
        # Sizes that depend on data are observed in the forward; the backward reads the same values.
        see = size_observer(module.outputs, seen.size) if seen is not None and step[0] is ActionKind.FORWARD else None
        inputs = tuple(known[node] for node in module.inputs)
        # Views of inputs that come from other stages: the input itself has to stay alive as long as they do.
        bases = {viewed(node) for node in module.inputs if node not in outside} & outside
        outputs = tuple(numbers[node] for node in module.outputs)
        return StepCode(
            call=compiled.call,
            inputs=inputs,
            outputs=outputs,
            elsewhere=compiled.elsewhere,
            random=compiled.random,
            see=see,
            views=tuple(sorted(known[base].index for base in bases)),
            collectives=collectives_of(module.module.graph),
        )

    steps: dict[StageAction, StepCode] = {step: code(step, module) for step, module in variant.steps.modules.items()}
    return PipelineProgram(
        steps=steps,
        graph=variant.steps.graph,
        outputs=tuple(known.get(node) for node in lowered.forward.results[: lowered.forward.outputs]),
        gradients=tuple(
            Gradient(-1, None) if primal is None else Gradient(primal, known.get(node))
            for primal, node in zip(lowered.gradient_owners, backward, strict=True)
        ),
        tangents=tuple(differentiated),
        mutations=lowered.updates,
        values=tuple(node.meta.get("val") for node in numbers),
        draws=variant.steps.draws,
        views={number: known[base].index for node, number in numbers.items() if (base := viewed(node)) in outside},
    )


def _sum_before(node: fx.Node) -> fx.Node:
    """The graph input that a sum of gradients begins with."""
    while node.target in SUMMING:
        total = node.args[0]
        assert isinstance(total, fx.Node)
        node = total
    return node


class _Compiled:
    """A stage module, compiled for the device that it was traced for and, on request, for others."""

    def __init__(self, module: fx.GraphModule, compiler: StageCompiler, see_workspace: ObserveSize | None) -> None:
        self._module = module
        self._compiler = compiler
        self._see_workspace = see_workspace
        self._elsewhere: dict[torch.device, Boxed] = {}
        self.random = random_streams.draws(module)
        self.call = self._compile(module)

    def elsewhere(self, device: torch.device) -> Boxed:
        """Compile the module for another device, once."""
        # Inductor's caches and global settings are not safe between threads, and every worker may ask.
        with COMPILING:
            if device not in self._elsewhere:
                self._elsewhere[device] = self._compile(moved(self._module, device))
            return self._elsewhere[device]

    def _compile(self, module: fx.GraphModule) -> Boxed:
        # Eager stages draw from the microbatch's own stream, operation by operation. Compiled ones draw inside a
        # kernel, so the stream is entered around the whole module.
        if self._compiler == "eager":
            drawing = random_streams.draw_from_streams(module) if self.random else module
            profiled = drawing if self._see_workspace is None else profile_operators(drawing, self._see_workspace)
            return compile_stage(profiled, "eager")
        compiled = compile_in_parts(module, self._compiler)
        return random_streams.run_on_stream(compiled) if self.random else compiled


def merge_stage_graphs(graphs: Sequence[StageGraph]) -> StageGraph:
    """All steps of several graphs, each reading everything that it reads in any of them."""
    reads: dict[StageAction, tuple[StageAction, ...]] = {}
    carried: dict[StageAction, tuple[StageAction, ...]] = {}
    # A step that some microbatches lack (no gradient for a single row) is part of the schedule all the same.
    for graph in graphs:
        for all_of, sources_of in ((reads, graph.reads), (carried, graph.carried)):
            for step, sources in sources_of.items():
                all_of[step] = tuple(dict.fromkeys((*all_of.get(step, ()), *sources)))
    return StageGraph(reads, carried)
