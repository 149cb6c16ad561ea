"""A pipelined step: splits a batch into microbatches, runs them by a schedule, and merges their losses or outputs.

First each microbatch is captured from a call of the compiled model, as a graph and its arguments; then the workers run
all of them; then the results are returned to each call, so that buffers are updated and the model builds its own
outputs. Gradients reach the parameters and inputs through autograd, so hooks run and ``.grad`` accumulates as usual;
this happens after the whole step, so a step that fails leaves no gradients behind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_fx import torch_private
from roundpipe_fx.pipeline.calls_alive import CallsAlive
from roundpipe_fx.pipeline.captured_calls import CapturedCalls, capture_calls, check_unchanged
from roundpipe_fx.pipeline.compiled_functions import detached, functions_of, loss_output
from roundpipe_fx.pipeline.cumulative_batch_norm import cumulative
from roundpipe_fx.pipeline.deferred_batch_norm import deferred, tensors_of_sums
from roundpipe_fx.pipeline.given_microbatches import given_microbatches
from roundpipe_fx.pipeline.gradients import gather, hand_to_autograd, loss_with_gradients, receivers_of
from roundpipe_fx.pipeline.gradients_of_loss import gradients_of_loss
from roundpipe_fx.pipeline.kept_results import KeptResults
from roundpipe_fx.pipeline.microbatch import (
    SplitTensor,
    check_batch_sizes,
    merge,
    row_counts,
    sizes_differ,
    split_inputs,
    split_labels,
    split_tensors,
    weighted_sum,
)
from roundpipe_fx.pipeline.offloaded import Offloaded, offloaded
from roundpipe_fx.pipeline.one_graph import explaining_breaks, refuse_jagged
from roundpipe_fx.pipeline.over_processes import ProcessPipeline
from roundpipe_fx.pipeline.pytorch_stages import TracedStep
from roundpipe_fx.pipeline.scheduled import Scheduled, scheduled_run
from roundpipe_fx.pipeline.settings import COUNT_OF_BATCH, Pipelining, StepCompileState
from roundpipe_fx.pipeline.structures import map_leaves
from roundpipe_fx.pipeline.through_autograd import through_autograd
from roundpipe_fx.pipeline.updating import updating
from roundpipe_fx.runtime import random_streams
from roundpipe_fx.runtime.bridge import NothingCompiled, return_results
from roundpipe_fx.runtime.optimizer_parameters import OptimizerParameters
from roundpipe_fx.runtime.pipeline_run import Finished, joined_spans, run_pipeline
from roundpipe_fx.runtime.stage_updates import StepUpdates
from roundpipe_fx.runtime.worker import Workers
from roundpipe_fx.schedules import ActionKind

__all__ = ["Pipeline", "Splitting"]


_BACKWARD = (ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Splitting:
    """How batches are split and outputs merged; ``None``: by convention.

    For specifications see :mod:`roundpipe_fx.pipeline.microbatch`.

    Attributes:
        inputs: ``split_input``.
        labels: ``split_label``.
        outputs: ``merge_output``.
    """

    inputs: Any = None
    labels: Any = None
    outputs: Any = None


@dataclass(frozen=True)
class _StepCalls:
    """The calls of a step.

    Attributes:
        calls: one for each microbatch.
        splits: what was split into their inputs.
        weights: of each microbatch's loss.
        rows: of each microbatch.
    """

    calls: list[functools.partial[Any]]
    splits: list[SplitTensor]
    weights: list[float]
    rows: list[int]


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
        compile_state: StepCompileState,
        splitting: Splitting,
        deferred_batch_norm: bool,
        optimized: OptimizerParameters,
        processes: ProcessPipeline | None = None,
    ) -> None:
        self.settings = settings
        self._processes = processes
        self._model = model
        self._compile_state = compile_state
        self._splitting = splitting
        self._optimized = optimized
        self._deferred = deferred_batch_norm
        self._compile_function = compile_function
        self.compiled = self._compiled()
        self._workers: Workers | None = None
        self._offloaded: Offloaded | None = None
        self._schedules: dict[Any, Scheduled] = {}
        self._lock = torch_private.ForkedLock()
        self._alive = CallsAlive()
        self._names = _positional_names(model)
        self._kept = KeptResults(model)

    def _compiled(self) -> dict[str, Callable[..., Any]]:
        return {kind: self._compile_function(function) for kind, function in functions_of(self._model).items()}

    def forward_backward(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: Any,
        loss_fn: Callable[..., Any] | None,
        return_outputs: bool,
        hand_over: bool = True,
        optimizer: torch.optim.Optimizer | None = None,
        synchronize: bool = True,
        microbatches: Sequence[Any] | None = None,
    ) -> Any:
        """See :meth:`roundpipe_fx.CompiledModule.forward_backward`.

        Args:
            args: for the model.
            kwargs: for the model.
            labels: for ``loss_fn``.
            loss_fn: computes the loss.
            return_outputs: whether to return the model's outputs too.
            hand_over: whether gradients are passed to parameters and inputs now, or when the returned loss is
                differentiated.
            optimizer: steps within this step.
            synchronize: whether to wait for its updates.
            microbatches: the batch, split by the caller; ``None``: it is to be split.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "forward_backward computes gradients, but autograd is off here (no_grad); call the model."
            )
        kind = "outputs" if return_outputs else "loss"
        with self._lock, self._batch_norm():
            args, kwargs, labels, microbatches = self._placed((args, kwargs, labels, microbatches), loss_fn)
            captured, made, weights = self._captured(
                lambda: self._calls_of_step(args, kwargs, labels, loss_fn, kind, microbatches),
                (args, kwargs, labels, loss_fn, kind, microbatches),
            )
            splits = made.splits
            receivers = receivers_of(captured.primals, splits, self._sharded())
            losses = [loss_output(graph, loss_fn) for graph in captured.graphs]
            of_each = zip(captured.graphs, losses, captured.primals, weights, strict=True)
            tangents = [gradients_of_loss(*of_one) for of_one in of_each]
            within = self._updating(captured, optimizer, synchronize)
            with within as updates:
                finished = self._run(captured, tangents, None, [], updates)
                gather(finished.gradients, splits)
                total = weighted_sum(
                    [of_batch[place] for of_batch, place in zip(finished.outputs, losses, strict=True)], weights
                )
                ready = receivers, captured.primals, finished.outputs, finished.gradients
                if not hand_over:  # to the inputs as they were before the step updated them
                    total = loss_with_gradients(total, *ready)
                outputs = self._model_outputs(captured, finished.outputs)
                merged = None
                if return_outputs:  # before gradients are handed over: it may be an error
                    parts = [map_leaves(lambda _, value: detached(value), output) for _, output in outputs]
                    merged = merge(parts, self._splitting.outputs, weights, made.rows)
                if self._processes is not None and captured.averaged:
                    self._processes.replication.replace_unsynchronized()
                hand_to_autograd(*ready)
        return self._returned((total, merged) if return_outputs else total)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; where autograd is on, all backwards run when they are differentiated."""
        with self._lock, self._batch_norm():
            args, kwargs = self._placed((args, kwargs))
            make = functools.partial(self._calls_of_model, args, kwargs)
            try:
                captured, made, weights = self._captured(make, (args, kwargs), forwards_before_backwards=True)
            except NothingCompiled as uncomputed:
                self._optimized.updates.synchronize()
                made = make()
                outputs = [uncomputed.output, *(call() for call in made.calls[1:])]
                return self._returned(merge(outputs, self._splitting.outputs, made.weights, made.rows))
            training = any(program.tangents for program in captured.programs)
            if not training:
                finished = self._run(captured, [[] for _ in captured.programs], (ActionKind.FORWARD,), [])
                outputs = self._model_outputs(captured, finished.outputs)
                return self._returned(merge(outputs, self._splitting.outputs, weights, made.rows))
            run = functools.partial(self._run_part, captured)
            if self._processes is not None:
                self._processes.refuse_backward_elsewhere(self._scheduled(captured, None))
            results, of_outputs = through_autograd(captured, made.splits, run, self._alive, self._sharded())
            outputs = self._model_outputs(captured, results, of_outputs)
        return self._returned(merge(outputs, self._splitting.outputs, weights, made.rows))

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedStep:
        """Compile without running anything: for forward_backward if there are ``labels`` or a ``loss_fn``, else for a
        call."""
        made: list[functools.partial[Any]] = []

        def noted(calls: _StepCalls) -> _StepCalls:
            made[:] = calls.calls  # of the last time: what was known to this rank alone is prepared again
            return calls

        loss_fn = kwargs.get("loss_fn")
        with self._lock, self._batch_norm():
            args, kwargs = self._placed((args, kwargs), loss_fn)
            labels, microbatches = kwargs.get("labels"), kwargs.get("microbatches")
            batch = (args, kwargs)
            if labels is None and loss_fn is None and microbatches is None:
                make = lambda: noted(self._calls_of_model(args, kwargs))  # noqa: E731
                captured, *_ = self._captured(make, batch, forwards_before_backwards=True, runs=False)
                return TracedStep(captured, self._scheduled(captured, None).instructions, *made[0].args)
            ours = ("labels", "loss_fn", "microbatches")
            inputs = {name: value for name, value in kwargs.items() if name not in ours}
            make = lambda: noted(self._calls_of_step(args, inputs, labels, loss_fn, "loss", microbatches))  # noqa: E731
            captured, *_ = self._captured(make, batch, runs=False)
            return TracedStep(captured, self._scheduled(captured, None).instructions, *made[0].args[2:])

    def _captured(
        self,
        make: Callable[[], _StepCalls],
        batch: Any,
        forwards_before_backwards: bool = False,
        runs: bool = True,
    ) -> tuple[CapturedCalls, _StepCalls, list[float]]:
        """The microbatches, the calls that were captured, and weights; the same on all ranks.

        Args:
            make: makes the calls.
            batch: the step's inputs.
            forwards_before_backwards: whether all forwards are to run before all backwards.
            runs: whether they are to run.
        """
        made: list[_StepCalls] = []

        def capture() -> CapturedCalls:
            made[:] = [make()]
            return self._take(made[0].calls, forwards_before_backwards)

        def prepare() -> tuple[CapturedCalls, Scheduled]:
            captured = capture()
            return captured, self._scheduled(captured, None)

        if self._processes is None:
            captured = capture()
        else:
            agreed_on = batch, torch.is_grad_enabled()
            captured = self._processes.agreed(
                agreed_on, self._generator_device, prepare, runs, self.settings.microbatches
            )
        added = any(graph.loss_reduction == "sum" for graph in captured.graphs)
        return captured, made[0], [1.0] * len(made[0].weights) if added else made[0].weights

    def _calls_of_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _StepCalls:
        """A call for each microbatch."""
        self._refuse_jagged((args, kwargs))
        pieces = split_inputs(args, kwargs, self.settings.microbatches, self._splitting.inputs, self._names)
        calls = [functools.partial(self.compiled["model"], *piece) for piece in pieces]
        rows = self._rows(args, kwargs, pieces)
        return _StepCalls(calls, self._split(args, kwargs, pieces), self._weights(pieces, rows), rows)

    def _calls_of_step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: Any,
        loss_fn: Any,
        kind: str,
        microbatches: Sequence[Any] | None = None,
    ) -> _StepCalls:
        """A call for each microbatch of a step with its loss."""
        if microbatches is not None:
            return self._calls_of_given(microbatches, loss_fn, kind)
        if labels is not None and loss_fn is None:
            kwargs, labels = {**kwargs, "labels": labels}, None  # a model that takes its labels itself
        self._refuse_jagged((args, kwargs))
        splitting, count = self._splitting, self.settings.microbatches
        pieces = split_inputs(args, kwargs, count, splitting.inputs, self._names, labels, splitting.labels)
        check_batch_sizes(args, kwargs, labels, count, splitting.inputs, splitting.labels)
        targets = split_labels(labels, len(pieces), splitting.labels, (args, kwargs), splitting.inputs)
        calls = [
            functools.partial(self.compiled[kind], loss_fn, labels is not None, own_args, own_kwargs, label)
            for (own_args, own_kwargs), label in zip(pieces, targets, strict=True)
        ]
        splits = [*self._split(args, kwargs, pieces), *split_tensors(labels, targets, splitting.labels)]
        rows = self._rows(args, kwargs, pieces)
        return _StepCalls(calls, splits, self._weights(pieces, rows), rows)

    def _refuse_jagged(self, inputs: Any) -> None:
        if self._splitting.inputs is None:
            refuse_jagged(inputs)

    def _calls_of_given(self, microbatches: Sequence[Any], loss_fn: Any, kind: str) -> _StepCalls:
        """A call for each microbatch that the caller has split."""
        split_already = given_microbatches(microbatches, self.settings.microbatches, loss_fn is not None)
        calls = [
            functools.partial(self.compiled[kind], loss_fn, one.labels is not None, one.args, one.kwargs, one.labels)
            for one in split_already
        ]
        pieces = [(one.args, one.kwargs) for one in split_already]
        rows = row_counts((), {}, pieces, list)  # of each, the first tensor's
        return _StepCalls(calls, [], self._weights(pieces, rows), rows)

    def _rows(self, args: Any, kwargs: Any, pieces: Sequence[tuple[Any, Any]]) -> list[int]:
        if len(pieces) == 1:
            return [1]  # what is not split has no rows
        return row_counts(args, kwargs, pieces, self._splitting.inputs)

    def _weights(self, pieces: Sequence[tuple[Any, Any]], rows: Sequence[int]) -> list[float]:
        """The weight of each microbatch's loss in that of the batch, unless it reads the count of the whole batch."""
        self._compile_state.counted = any(kwargs.get(COUNT_OF_BATCH) is not None for _, kwargs in pieces)
        if self.settings.loss_reduction == "sum" or len(pieces) == 1:
            return [1.0] * len(pieces)
        return [count_of_batch / sum(rows) for count_of_batch in rows]

    def _split(self, args: Any, kwargs: Any, pieces: Sequence[tuple[Any, Any]]) -> list[SplitTensor]:
        spec = self._splitting.inputs
        of_args, of_kwargs = (spec, spec) if callable(spec) else (None, None) if spec is None else spec
        return [
            *split_tensors(args, [of_call for of_call, _ in pieces], of_args),
            *split_tensors(kwargs, [of_call for _, of_call in pieces], of_kwargs),
        ]

    def take_over_workers(self, replaced: Pipeline) -> None:
        """Run on the workers of a pipeline that this one replaces, and which may still have to run a backward.

        For new threads and streams libraries would keep more memory (:mod:`roundpipe_fx.runtime.library_memory`).
        """
        self._lock, self._workers = replaced._lock, replaced._workers

    def _devices(self) -> tuple[torch.device, ...]:
        """Of this process's workers; empty: one worker, where the model is."""
        return self.settings.devices if self._processes is None else self.settings.devices[:1]

    def _workers_on(self, devices: tuple[torch.device, ...]) -> Workers:
        """The workers, which are made if there are none for these devices. Others end when nobody holds them."""
        if self._workers is None or self._workers.devices != devices:
            self._workers = Workers(devices)
        return self._workers

    def _placed(self, inputs: Any, loss_fn: Any = None) -> Any:
        """Inputs where the graph is to run; notes whether the model is offloaded."""
        modules = [module for module in (self._model, loss_fn) if isinstance(module, nn.Module)]
        beside = tensors_of_sums(self._model) if self._deferred else ()
        before = self._offloaded
        self._offloaded = offloaded(self.settings.devices, modules, before, beside)
        if (before is None) != (self._offloaded is None):
            self.compiled = self._compiled()  # guards do not check where the model is
        return inputs if self._offloaded is None else self._offloaded.to_device(inputs)

    def _returned(self, outputs: Any) -> Any:
        """Outputs where the model is."""
        return outputs if self._offloaded is None else self._offloaded.to_host(outputs)

    def _looking_moved(self, updated: Collection[int] = ()) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._offloaded is None else self._offloaded.looking_moved(updated)

    def _traced(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._processes is None else self._processes.ownership.shards.traced()

    def _sharded(self) -> Mapping[int, torch.Tensor]:
        return {} if self._processes is None else self._processes.ownership.receivers()

    def _take(self, calls: list[functools.partial[Any]], forwards_before_backwards: bool) -> CapturedCalls:
        self._compile_state.offloaded = self._offloaded is not None or self.settings.offloaded
        self._compile_state.sizes_differ = sizes_differ([(call.args, call.keywords) for call in calls])
        if self._processes is not None:
            self._compile_state.pinned = self._processes.structure
        devices = self._devices()
        if devices and devices[0].type != "cpu":
            self._workers_on(devices)  # before a plan is made for the memory that is free
        with self._looking_moved(), self._traced():
            modules = [*self._model.modules()]
            keep = torch_private.keep_users_exceptions
            noting = [
                functools.partial(explaining_breaks, self._model, keep, call.func, modules, *call.args, **call.keywords)
                for call in calls
            ]
            return capture_calls(noting, self._compile_state, forwards_before_backwards)

    def _batch_norm(self) -> contextlib.AbstractContextManager[None]:
        return deferred(self._model) if self._deferred else cumulative(self._model)

    def _model_outputs(
        self,
        captured: CapturedCalls,
        results: Sequence[Sequence[Any]],
        differentiated: Sequence[Mapping[int, torch.Tensor]] | None = None,
    ) -> list[Any]:
        """The model's own outputs for each microbatch, from the results of the compiled graphs.

        Autograd would differentiate returned results through a graph that was never run, so those that are
        differentiated are replaced.
        """
        outputs, kept = [], []
        count = len(captured.calls)
        updated = {
            id(of_batch[place]): of_batch[place]
            for program, of_batch in zip(captured.programs, captured.primals, strict=True)
            for place in program.mutations.values()
        }
        writable: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._processes is not None:
            writable = self._processes.ownership.writable(updated.values())
        with self._looking_moved(updated), self._traced(), writable:
            for index, (call, of_batch) in enumerate(zip(captured.calls, results, strict=True)):
                returned = [value.detach() if isinstance(value, torch.Tensor) else value for value in of_batch]
                with return_results(returned, functools.partial(check_unchanged, captured, index)):
                    output = call()
                of_step = {} if differentiated is None else differentiated[index]
                pairs = [(returned[place], result) for place, result in of_step.items()]
                output, of_call = self._kept.replaced(captured.graphs[index], returned, pairs, output, count)
                outputs.append(output)
                kept.append(of_call)
        if count > 1 or differentiated is not None:
            self._kept.learn(captured.graphs, kept)
        if self._processes is not None:
            self._processes.finish(captured)
        return outputs

    def _run_part(
        self, captured: CapturedCalls, tangents: Sequence[Sequence[Any]], left: list[dict[int, Any]] | None
    ) -> Finished:
        """All forwards, or all backwards with what the forwards have saved."""
        with self._lock:
            finished = self._run(captured, tangents, (ActionKind.FORWARD,) if left is None else _BACKWARD, left or [])
            if self._processes is not None and captured.averaged and left is not None:
                self._processes.replication.replace_unsynchronized()
            return finished

    def _run(
        self,
        captured: CapturedCalls,
        tangents: Sequence[Sequence[Any]],
        kinds: tuple[ActionKind, ...] | None,
        inherited: Sequence[dict[int, Any]],
        updating: StepUpdates | None = None,
    ) -> Finished:
        scheduled = self._scheduled(captured, kinds)
        device = self._generator_device(captured)
        first = self._processes.replication.first_stream if self._processes is not None else 0
        streams = random_streams.random_streams(device, len(captured.programs), first)
        workers = self._workers_on(self._devices() or (device,))
        on_host: Collection[int] = ()
        if self._offloaded is not None:
            self._offloaded.pin()
            on_host = self._offloaded.tensors.keys()
        if self._processes is not None:
            finished = self._processes.run(workers, captured, kinds, self._scheduled, tangents, streams, inherited)
        else:
            finished = run_pipeline(
                workers,
                scheduled.instructions,
                captured.programs,
                captured.primals,
                tangents,
                streams,
                inherited,
                on_host,
                offloads=scheduled.offloads,
                updates=self._optimized.updates,
                updating=updating,
            )
        random_streams.finish(device, streams)
        whole = kinds != _BACKWARD or not captured.graphs[0].measured
        before = [] if whole else captured.graphs[0].measured[-1]
        captured.graphs[0].measured[:] = [joined_spans(before, finished.spans)]
        return finished

    def _updating(
        self, captured: CapturedCalls, optimizer: torch.optim.Optimizer | None, synchronize: bool
    ) -> contextlib.AbstractContextManager[StepUpdates | None]:
        updatable: Collection[int] | None = None if self._offloaded is None else self._offloaded.tensors.keys()
        if self._processes is not None:
            updatable = ()  # their gradients are put together after the step
        return updating(self._optimized, optimizer, synchronize, captured, updatable)

    def _scheduled(self, captured: CapturedCalls, kinds: tuple[ActionKind, ...] | None) -> Scheduled:
        key = (kinds, *(id(program) for program in captured.programs))
        if key not in self._schedules:
            self._schedules[key] = scheduled_run(captured, kinds)
        return self._schedules[key]

    def _generator_device(self, captured: CapturedCalls) -> torch.device:
        kind = self.settings.devices[0].type if self.settings.devices else None
        if self._offloaded is not None:
            return self._offloaded.device
        for value in (value for primals in captured.primals for value in primals):
            if isinstance(value, torch.Tensor) and kind in (None, value.device.type):
                return value.device
        return torch.device("cpu")


def _positional_names(model: nn.Module) -> list[str]:
    """The names of a model's positional arguments, for messages."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]
