"""A pipelined step: a batch as microbatches, through a schedule, and back as one loss or one output.

Each microbatch is first taken from the compiled model as a graph and its arguments; all are run by the workers; then
each is answered, so that buffers are updated and the model's own outputs are put together. Gradients reach the
parameters and inputs through autograd, so hooks run and ``.grad`` is added to as ever: after the whole step, so a step
that fails leaves no gradient behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map

from roundpipe_fx.pipeline.deferred_batch_norm import deferred
from roundpipe_fx.pipeline.graph import PipelinedGraph, union
from roundpipe_fx.pipeline.microbatch import check_batch_sizes, merge, split_inputs, split_labels
from roundpipe_fx.pipeline.settings import Likeness, Pipelining
from roundpipe_fx.runtime import random_streams
from roundpipe_fx.runtime.pipeline_program import Instruction, PipelineProgram, instructions_of
from roundpipe_fx.runtime.pipeline_run import Finished, Span, run_pipeline
from roundpipe_fx.runtime.pipelined_calls import answering, take
from roundpipe_fx.runtime.worker import Workers
from roundpipe_fx.schedules import Kind

__all__ = ["Pipeline", "Splitting"]

_BACKWARD = (Kind.RECOMPUTE, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Splitting:
    """How batches are split and outputs put together; ``None``: by convention.

    What specifications there are says :mod:`roundpipe_fx.pipeline.microbatch`.

    Attributes:
        inputs: ``split_input``.
        labels: ``split_label``.
        outputs: ``merge_output``.
    """

    inputs: Any = None
    labels: Any = None
    outputs: Any = None


@dataclass(frozen=True)
class _Taken:
    """The microbatches of a step, ready to run."""

    calls: list[Callable[[], Any]]
    graphs: list[PipelinedGraph]
    programs: list[PipelineProgram]
    primals: list[list[Any]]


class Pipeline:
    """Runs a model's steps on workers.

    Attributes:
        settings: how.
        compiled: the model, the model with its loss, and that with its outputs, compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Pipelining,
        compile_function: Callable[[Callable[..., Any]], Callable[..., Any]],
        likeness: Likeness,
        splitting: Splitting,
        deferred_batch_norm: bool,
    ) -> None:
        self.settings = settings
        self._model = model
        self._likeness = likeness
        self._splitting = splitting
        self._deferred = deferred_batch_norm
        self.compiled = {kind: compile_function(function) for kind, function in _functions(model).items()}
        self._workers: Workers | None = None
        self._schedules: dict[Any, tuple[list[list[Instruction]], list[PipelineProgram]]] = {}
        self._lock = threading.RLock()

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: Any,
        loss_fn: Callable[..., Any] | None,
        return_outputs: bool,
    ) -> Any:
        """See :meth:`roundpipe_fx.CompiledModule.forward_backward`."""
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "forward_backward computes gradients, but autograd is off here (no_grad); call the model."
            )
        if labels is not None and loss_fn is None:
            kwargs, labels = {**kwargs, "labels": labels}, None  # a model that takes its labels itself
        run = self.compiled["outputs" if return_outputs else "loss"]
        pieces = split_inputs(args, kwargs, self.settings.microbatches, self._splitting.inputs)
        if self._splitting.inputs is None and self._splitting.labels is None:
            check_batch_sizes(args, kwargs, labels)
        targets = split_labels(labels, len(pieces), self._splitting.labels)
        with self._lock, self._batch_norm():
            taken = self._take(
                [
                    functools.partial(run, loss_fn, labels is not None, own_args, own_kwargs, label)
                    for (own_args, own_kwargs), label in zip(pieces, targets, strict=True)
                ]
            )
            losses = [_loss_output(graph, loss_fn) for graph in taken.graphs]
            tangents = [
                [torch.ones((), dtype=graph.tangents[0].dtype, device=graph.tangents[0].device)]
                for graph in taken.graphs
            ]
            finished = self._run(taken, tangents, None, [])
            outputs = self._answer(taken, finished.outputs)
            _hand_to_autograd(taken, finished.outputs, finished.gradients)
        total = None
        for own, place in zip(finished.outputs, losses, strict=True):
            total = own[place] if total is None else total + own[place]
        if not return_outputs:
            return total
        return total, merge([tree_map(_detached, output) for _, output in outputs], self._splitting.outputs)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; where autograd is on, all backwards run when they are differentiated."""
        pieces = split_inputs(args, kwargs, self.settings.microbatches, self._splitting.inputs)
        run = self.compiled["model"]
        with self._lock, self._batch_norm():
            taken = self._take([functools.partial(run, a, k) for a, k in pieces])
            training = any(program.tangents for program in taken.programs)
            if not training:
                finished = self._run(taken, [[] for _ in pieces], (Kind.FORWARD,), [])
                return merge(self._answer(taken, finished.outputs), self._splitting.outputs)
            tensors = _differentiable(taken.primals)
            step = _Step(self, taken)
            flat = _PipelinedStep.apply(step, *tensors)
            counts = [len(program.outputs) for program in taken.programs]
            results = [list(own) for own in _chunks(flat, counts)]
            outputs = self._answer(taken, results, keep_graph=True)
        return merge(outputs, self._splitting.outputs)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for these arguments without running anything."""
        pieces = split_inputs(args, kwargs, self.settings.microbatches, self._splitting.inputs)
        with self._lock, self._batch_norm():
            self._take([functools.partial(self.compiled["model"], a, k) for a, k in pieces])

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _batch_norm(self) -> contextlib.AbstractContextManager[None]:
        return deferred(self._model) if self._deferred else contextlib.nullcontext()

    def _take(self, calls: list[Callable[[], Any]]) -> _Taken:
        graphs: list[PipelinedGraph] = []
        primals = []
        self._likeness.structure = None
        for call in calls:
            graph, arguments = take(call)
            graphs.append(graph)
            primals.append(arguments)
            self._likeness.structure = graphs[0].pipeline.structure
            _check_alike(graphs[0], graph)
        programs = [graph.main for graph in graphs[:-1]] + [graphs[-1].last]
        return _Taken(calls, graphs, programs, primals)

    def _answer(self, taken: _Taken, results: Sequence[Sequence[Any]], keep_graph: bool = False) -> list[Any]:
        """The model's own outputs for each microbatch, from the compiled graphs' results."""
        answers = []
        for call, own in zip(taken.calls, results, strict=True):
            given = [value.detach() if isinstance(value, torch.Tensor) else value for value in own]
            with answering(given):
                output = call()
            # Autograd's view of the answer is of a graph that was never run: outputs are replaced by the step's own.
            own_of = {id(alias): value for alias, value in zip(given, own, strict=True)} if keep_graph else {}
            answers.append(tree_map(functools.partial(_replaced, own_of), output) if keep_graph else output)
        return answers

    def _run(
        self,
        taken: _Taken,
        tangents: Sequence[Sequence[Any]],
        kinds: tuple[Kind, ...] | None,
        given: Sequence[dict[int, Any]],
    ) -> Finished:
        instructions = self._instructions(taken, kinds)
        home = self._home(taken)
        streams = random_streams.random_streams(home, len(taken.programs))
        if self._workers is None:
            self._workers = Workers(self.settings.devices or (home,))
        finished = run_pipeline(self._workers, instructions, taken.programs, taken.primals, tangents, streams, given)
        random_streams.finish(home, streams)
        whole = kinds != _BACKWARD or not taken.graphs[0].measured
        before = [] if whole else taken.graphs[0].measured[-1]
        taken.graphs[0].measured[:] = [_joined(before, finished.spans)]
        return finished

    def _instructions(self, taken: _Taken, kinds: tuple[Kind, ...] | None) -> list[list[Instruction]]:
        key = (kinds, *(id(program) for program in taken.programs))
        if key not in self._schedules:
            graph = union([program.graph for program in taken.programs])
            pipeline = taken.graphs[0].pipeline
            count = len(taken.programs)
            whole = pipeline.schedule(graph, count)
            schedule = whole if kinds is None else whole.only(*kinds)
            # The programs are held, so that their identities stay theirs.
            self._schedules[key] = instructions_of(schedule, taken.programs), taken.programs
        return self._schedules[key][0]

    def _home(self, taken: _Taken) -> torch.device:
        kind = self.settings.devices[0].type if self.settings.devices else None
        for value in (value for primals in taken.primals for value in primals):
            if isinstance(value, torch.Tensor) and kind in (None, value.device.type):
                return value.device
        if kind not in (None, "cpu"):
            raise ValueError(
                f"the model and its inputs are on the CPU, but devices={[str(d) for d in self.settings.devices]}: move "
                f"them to one of these first, as model.to({str(self.settings.devices[0])!r}). The model is traced "
                "where it is, and stages get copies of their parameters."
            )
        return torch.device("cpu")


class _Step:
    """A step between its forward and its backward."""

    def __init__(self, pipeline: Pipeline, taken: _Taken) -> None:
        self.pipeline = pipeline
        self.taken = taken
        self.values: list[dict[int, Any]] | None = None
        self.versions: list[tuple[torch.Tensor, int]] = []

    def forward(self) -> list[list[Any]]:
        finished = self.pipeline._run(self.taken, [[] for _ in self.taken.programs], (Kind.FORWARD,), [])
        self.values = finished.values
        mutated = {
            id(primals[place])
            for program, primals in zip(self.taken.programs, self.taken.primals, strict=True)
            for place in program.mutations.values()
        }
        read = [value for primals in self.taken.primals for value in primals if id(value) not in mutated]
        read += [value for values in self.values for value in values.values()]
        self.versions = [(value, value._version) for value in read if isinstance(value, torch.Tensor)]
        return finished.outputs

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        if self.values is None:
            raise RuntimeError(
                "the backward of this pipelined step has run already, and what it needs is freed: call the model again."
            )
        for value, version in self.versions:
            if value._version != version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(value.shape)} that the backward of this pipelined step needs was "
                    "changed in place after the forward."
                )
        self.versions = []
        values, self.values = self.values, None
        tangents = []
        for own, graph, program in zip(
            _chunks(gradients, [len(program.outputs) for program in self.taken.programs]),
            self.taken.graphs,
            self.taken.programs,
            strict=True,
        ):
            tangents.append(
                [_tangent(own[place], like) for place, like in zip(program.tangents, graph.tangents, strict=True)]
            )
        with self.pipeline._lock:
            finished = self.pipeline._run(self.taken, tangents, _BACKWARD, values)
        return finished.gradients


class _PipelinedStep(torch.autograd.Function):
    """All microbatches of a step as one function: of the parameters and inputs, to every microbatch's outputs."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.step = step
        ctx.keys = [id(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        outputs = step.forward()
        fixed = []
        for program, own in zip(step.taken.programs, outputs, strict=True):
            rest = set(range(len(own))) - set(program.tangents)
            fixed += [own[place] for place in rest if isinstance(own[place], torch.Tensor)]
        ctx.mark_non_differentiable(*fixed)
        return tuple(value for own in outputs for value in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        found = ctx.step.backward(gradients)
        return (None, *(found.get(key) for key in ctx.keys))


def _functions(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """What is compiled: the model; the model with its loss; and that with its outputs beside the loss."""

    def call_model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model(*args, **kwargs)

    def call_loss(loss_fn: Any, labelled: bool, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> Any:
        return _loss(loss_fn, labelled, model(*args, **kwargs), label)

    def call_outputs(loss_fn: Any, labelled: bool, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> Any:
        output = model(*args, **kwargs)
        return _loss(loss_fn, labelled, output, label), tree_map(_detached, output)

    return {"model": _own_code(call_model), "loss": _own_code(call_loss), "outputs": _own_code(call_outputs)}


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with a code object of its own: Dynamo keeps what it compiled by code object, and at most eight of it."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def _loss(loss_fn: Any, labelled: bool, output: Any, label: Any) -> Any:
    if loss_fn is not None:
        return loss_fn(output, label) if labelled else loss_fn(output)
    return output if isinstance(output, torch.Tensor) else output[0] if isinstance(output, tuple) else output.loss


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _replaced(own_of: dict[int, Any], value: Any) -> Any:
    if id(value) in own_of:
        return own_of[id(value)]
    base = getattr(value, "_base", None)
    if isinstance(base, torch.Tensor) and id(base) in own_of:  # one of several views of one output
        return own_of[id(base)].as_strided(value.shape, value.stride(), value.storage_offset())
    return value


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


def _loss_output(graph: PipelinedGraph, loss_fn: Any) -> int:
    """Number of the output that is the loss."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__) if loss_fn is not None else "the model"
    if len(graph.main.tangents) != 1:
        raise ValueError(
            f"{name} returned no loss that can be differentiated: it must return a tensor that depends on parameters "
            "that require grad."
        )
    place = graph.main.tangents[0]
    shape = tuple(graph.outputs[place].shape)
    if shape:
        raise ValueError(
            f"{name} returned a loss of shape {shape}; it must be a single number, as from reduction='sum' or .sum()."
        )
    return place


def _hand_to_autograd(taken: _Taken, outputs: Sequence[Sequence[Any]], gradients: dict[int, torch.Tensor]) -> None:
    """Add gradients to ``.grad`` and to what inputs were made from. ``gradients`` is emptied.

    Autograd copies the gradient that it is given for a leaf without one, so what is the step's own becomes ``.grad`` as
    it is, unless somebody listens.
    """
    found = {id(value): value for own in taken.primals for value in own if id(value) in gradients}
    others = [value for values in (*taken.primals, *outputs) for value in values if isinstance(value, torch.Tensor)]
    shared = Counter(value.untyped_storage()._cdata for value in gradients.values())
    shared.update({storage: 1 for storage in {value.untyped_storage()._cdata for value in others}})
    leaves, rest = [], []
    for key, value in found.items():
        if not value.requires_grad:
            continue
        gradient = gradients.pop(key)
        storage = gradient.untyped_storage()
        listens = value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
        own = shared[storage._cdata] == 1 and storage.nbytes() == gradient.numel() * gradient.element_size()
        if value.is_leaf and value.grad is None and not listens and own and gradient.stride() == value.stride():
            value.grad = gradient
        else:
            leaves.append(value)
            rest.append(gradient)
    if leaves:
        torch.autograd.backward(leaves, rest)


def _differentiable(primals: Sequence[Sequence[Any]]) -> list[torch.Tensor]:
    found = {id(v): v for own in primals for v in own if isinstance(v, torch.Tensor) and v.requires_grad}
    return list(found.values())


def _tangent(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An incoming gradient with the strides that the backward was traced with."""
    shape, stride = [int(size) for size in like.shape], like.stride()
    if gradient is None:
        return torch.zeros((), dtype=like.dtype, device=like.device).expand(shape)
    if gradient.stride() == stride:
        return gradient
    return torch.empty_strided(shape, stride, dtype=like.dtype, device=gradient.device).copy_(gradient)


def _joined(before: list[list[Span]], after: list[list[Span]]) -> list[list[Span]]:
    """The spans of a forward and of its backward, which ran later, as those of one step."""
    if not before:
        return after
    return [
        [*first, *(dataclasses.replace(span, base=first[0].base) if first else span for span in then)]
        for first, then in zip(before, after, strict=True)
    ]


def _chunks(values: Sequence[Any], counts: Sequence[int]) -> Iterator[Sequence[Any]]:
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count
