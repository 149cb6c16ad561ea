"""A pipelined step as one function of autograd: all forwards when called, all backwards when differentiated.

What autograd sees is a single node, from the parameters and inputs to every microbatch's outputs. When autograd reaches
it, all incoming gradients are known, and the backwards of all microbatches run as scheduled. For two microbatches whose
outputs 0 and 2 are differentiated::

    parameters, inputs ──▶ run([[], []], None) ────────────────────────────▶ o0.0, o0.2, o1.0, o1.2    all forwards
                                │ values that the backwards read
    their gradients ◀───── run([[g0.0, zeros], [g1.0, g1.2]], values) ◀───── g0.0, None, g1.0, g1.2    all backwards

A pipeline's plan knows the microbatches of one call. If a step makes several calls before a backward, each device holds
the saved values of all of them, which no plan has counted. The user is warned once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.pipeline.batches.microbatch import SplitTensor
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.step.gradients import concatenate_split_gradients, receivers_of
from roundpipe_fx.pipeline.step.returned_outputs import ReturnedOutputs
from roundpipe_fx.remat.learned_steps import StepBudgetWarning
from roundpipe_fx.runtime.incoming_gradients import ExpectedGradient, incoming_gradient
from roundpipe_fx.runtime.pipeline_run import Finished


class CallsAlive:
    """The calls of one pipeline whose backward may still come."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned = False

    def add(self, call: Any, budget: int | None) -> None:
        """Record a call.

        Args:
            call: alive until its backward has begun (``call.values`` is ``None``) or nothing refers to it.
            budget: bytes that each device may take for one; ``None``: there is no limit.
        """
        # A call counts as alive while it holds saved values; the set is weak, so a dropped output releases its call.
        self._calls.add(call)
        alive = sum(1 for alive_call in self._calls if alive_call.values is not None)
        if alive > 1 and budget is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"roundpipe_fx: {alive} calls of a pipelined model were alive at once, before a backward. The "
                f"memory_budget of {budget} bytes ({bytes_text(budget)}) a device was planned for one call with all "
                "its microbatches, and does not hold for several together. Make them one batch, go backward after "
                "each, or give a smaller budget.",
                StepBudgetWarning,
                stacklevel=2,
            )


RunActions = Callable[[Sequence[Sequence[Any]], list[dict[int, Any]] | None], Finished]
"""Runs all forwards, or all backwards with what the forwards have saved; takes each microbatch's incoming gradients."""


def run_through_autograd(
    captured: CapturedCalls,
    splits: Sequence[SplitTensor],
    run: RunActions,
    alive: CallsAlive,
    returned: ReturnedOutputs,
    instead: Mapping[int, torch.Tensor] | None = None,
) -> tuple[list[list[Any]], list[dict[int, torch.Tensor]]]:
    """Each microbatch's results, and by number those that are differentiated, with the backwards behind them.

    Args:
        splits: tensors that were split into their inputs.
        returned: what the caller gets, which is looked at when the backward begins.
    """
    # One autograd node for the whole step: autograd calls `backward` once, when all incoming gradients are known, and
    # the schedule is free to order microbatches.
    step = _StepFunction(captured, splits, run, returned, instead or {})
    receivers = receivers_of(captured.primals, splits, instead)
    flat = _PipelinedStep.apply(step, [*receivers], *(receiver.tensor for receiver in receivers.values()))
    alive.add(step, captured.graphs[0].pipeline.budget)
    positions = [program.tangents for program in captured.programs]
    of_parts = _chunks(flat, [len(tangents_of) for tangents_of in positions])
    outputs, step.outputs = step.outputs, []  # a result that the caller drops is not held until the backward
    return outputs, [
        dict(zip(tangents_of, values, strict=True)) for tangents_of, values in zip(positions, of_parts, strict=True)
    ]


class _StepFunction:
    """A step between its forward and its backward."""

    def __init__(
        self,
        captured: CapturedCalls,
        splits: Sequence[SplitTensor],
        run: RunActions,
        returned: ReturnedOutputs,
        instead: Mapping[int, torch.Tensor],
    ) -> None:
        self.returned = returned
        self.instead = instead
        self.captured = captured
        self.splits = splits
        self.run = run
        self.values: list[dict[int, Any]] | None = None
        self.versions: list[tuple[torch.Tensor, int]] = []
        self.likes: list[list[ExpectedGradient]] = []
        self.outputs: list[list[Any]] = []

    def forward(self) -> None:
        finished = self.run([[] for _ in self.captured.programs], None)
        captured = self.captured
        self.outputs = [
            graph.unread.leave_unread(of_batch, graph.unread.inputs_of(primals))
            for graph, of_batch, primals in zip(captured.graphs, finished.outputs, captured.primals, strict=True)
        ]
        self.values = finished.values
        self.likes = [
            [
                ExpectedGradient.of(of_batch[position], fake)
                for position, fake in zip(program.tangents, graph.tangents, strict=True)
            ]
            for program, graph, of_batch in zip(captured.programs, captured.graphs, self.outputs, strict=True)
        ]
        # Buffers that the step updates itself change their versions legitimately; everything else that the backward
        # reads must not change before it.
        mutated = {
            id(primals[position])
            for program, primals in zip(self.captured.programs, self.captured.primals, strict=True)
            for position in program.mutations.values()
        }
        read = [
            self.instead.get(id(value), value)
            for primals in self.captured.primals
            for value in primals
            if id(value) not in mutated
        ]
        read += [value for values in self.values for value in values.values()]
        self.versions = [(value, value._version) for value in read if isinstance(value, torch.Tensor)]

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        if self.values is None:
            raise RuntimeError(
                "the backward of this pipelined step has run already, and what it needs is freed: call the model again."
            )
        self.returned.see(self.values)
        # Popped one by one: a value is freed as soon as it was checked and no longer read.
        while self.versions:  # do not hold what was checked
            value, version = self.versions.pop()
            if value._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(value.shape)} that the backward of this pipelined step needs was "
                    "changed in place after the forward."
                )
            del value
        # Moved out of the object first, so the run holds the only references, and values die at their last use.
        values, self.values = self.values, None
        tangents = [
            [incoming_gradient(*of_one) for of_one in zip(of_batch, likes, graph.strided, strict=True)]
            for of_batch, likes, graph in zip(
                _chunks(gradients, [len(program.tangents) for program in self.captured.programs]),
                self.likes,
                self.captured.graphs,
                strict=True,
            )
        ]
        gradients_found = self.run(tangents, values).gradients
        concatenate_split_gradients(gradients_found, self.splits)
        return gradients_found


class _PipelinedStep(torch.autograd.Function):
    """All microbatches of a step as one function: of the parameters and inputs, to every microbatch's outputs."""

    @staticmethod
    def forward(ctx: Any, step: _StepFunction, keys: list[int], *_tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.step = step
        ctx.keys = keys
        # A missing gradient stays None: `incoming_gradient` makes zeros where a stage needs them, with the strides that
        # were traced.
        ctx.set_materialize_grads(False)
        step.forward()
        return tuple(
            of_batch[position].detach()
            for program, of_batch in zip(step.captured.programs, step.outputs, strict=True)
            for position in program.tangents
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        with torch.no_grad():
            received = ctx.step.backward(gradients)
        results = [received.get(key) for key in ctx.keys]
        # Autograd records the backward itself. Results are tied to what they depend on, so that differentiating them
        # raises instead of giving zero.
        if torch.is_grad_enabled():  # create_graph=True
            differentiable = [value for value in gradients if value is not None and value.requires_grad]
            receivers = receivers_of(ctx.step.captured.primals, ctx.step.splits, ctx.step.instead)
            read = [receiver.tensor for receiver in receivers.values()]
            results = list(_OnceDifferentiable.apply(len(results), *results, *differentiable, *read))
        return (None, None, *results)


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients that depend on the inputs of a step, but cannot be differentiated themselves.

    ``torch.autograd.function.once_differentiable`` considers only incoming gradients: the gradient of a sum, which is
    ones, would have no graph at all, and second derivatives would silently lose terms.
    """

    @staticmethod
    def forward(_ctx: Any, count: int, *values: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if value is None else value.detach() for value in values[:count])

    @staticmethod
    def backward(_ctx: Any, *_: Any) -> None:
        raise RuntimeError(
            "a pipelined step cannot be differentiated twice (create_graph=True): its gradients are computed by "
            "compiled stages, which have no gradients themselves. For gradient penalties and Hessian-vector products "
            "call the model itself, uncompiled."
        )


def _chunks(values: Sequence[Any], counts: Sequence[int]) -> Iterator[Sequence[Any]]:
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count
