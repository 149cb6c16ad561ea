"""A pipelined step: splits a batch into microbatches, runs them by a schedule, and merges their losses or outputs.

Each microbatch is captured from a call of the compiled model before any of them runs. When all have run, the calls are
made again and get the results, so that buffers are updated and the model builds its own outputs::

    batch ── split ──▶ calls ── capture ──▶ graphs, arguments ── schedule ──▶ instructions ── run ──▶ results, gradients
    batch's outputs ◀── merge ◀── outputs of each microbatch ◀── the same calls again ◀── results

    forward_backward   one run of all actions; the losses are summed with weights; autograd gets the gradients last
    forward            one run of all forwards; one of all backwards when autograd reaches the outputs

Gradients reach the parameters and inputs through autograd, so hooks run and ``.grad`` accumulates as usual. This
happens after the whole step, so a step that fails leaves no gradients behind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roundpipe_fx import torch_private
from roundpipe_fx.pipeline.batches.microbatch import (
    SplitTensor,
    check_batch_sizes,
    has_different_sizes,
    make_microbatches,
    merge,
    refuse_jagged,
    row_counts,
    split_inputs,
    split_labels,
    split_tensors,
    weighted_sum,
)
from roundpipe_fx.pipeline.batches.structures import map_leaves
from roundpipe_fx.pipeline.capture.captured_calls import CapturedCalls, TracedStep, capture_calls, check_unchanged
from roundpipe_fx.pipeline.capture.compiled_functions import (
    call_explaining_breaks,
    detach_if_tensor,
    find_loss_output,
    functions_of,
)
from roundpipe_fx.pipeline.capture.running_statistics import (
    defer_statistics,
    tensors_of_sums,
    trace_cumulative_statistics,
)
from roundpipe_fx.pipeline.settings import COUNT_OF_BATCH, Pipelining, StepCompileState, StepSetting
from roundpipe_fx.pipeline.step.gradients import (
    concatenate_split_gradients,
    gradients_of_loss,
    hand_to_autograd,
    loss_with_gradients,
    receivers_of,
)
from roundpipe_fx.pipeline.step.kept_results import KeptResults
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.pipeline.step.offloaded import make_mode
from roundpipe_fx.pipeline.step.returned_outputs import ReturnedOutputs
from roundpipe_fx.pipeline.step.scheduled import Scheduled, schedule_run
from roundpipe_fx.pipeline.step.through_autograd import CallsAlive, run_through_autograd
from roundpipe_fx.pipeline.step.updating import update_during_step
from roundpipe_fx.runtime import random_streams
from roundpipe_fx.runtime.bridge import NothingCompiled, return_results
from roundpipe_fx.runtime.optimizer_parameters import OptimizerParameters
from roundpipe_fx.runtime.pipeline_run import Finished, join_spans
from roundpipe_fx.runtime.stage_updates import StepUpdates
from roundpipe_fx.runtime.worker import Workers
from roundpipe_fx.schedules import ActionKind

_BACKWARD = (ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Splitting:
    """Functions that split batches and merge outputs; ``None``: by convention.

    For specifications see :mod:`roundpipe_fx.pipeline.batches.microbatch`.
    """

    inputs: Any = None
    labels: Any = None
    outputs: Any = None


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """Arguments of :meth:`roundpipe_fx.CompiledModule.forward_backward`.

    Attributes:
        return_outputs: whether to return the model's outputs too.
        optimizer: steps within this step.
        synchronize: whether to wait for its updates.
        microbatches: the batch, split by the caller; ``None``: it is to be split.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Any = None
    loss_fn: Callable[..., Any] | None = None
    return_outputs: bool = False
    optimizer: torch.optim.Optimizer | None = None
    synchronize: bool = True
    microbatches: Sequence[Any] | None = None


@dataclass(frozen=True)
class _StepCalls:
    """The calls of a step.

    Attributes:
        calls: one for each microbatch.
        splits: what was split into their inputs.
        weights: of each microbatch's loss.
        counted: whether the model is given the number of what counts in the batch.
    """

    calls: list[functools.partial[Any]]
    splits: list[SplitTensor]
    weights: list[float]
    rows: list[int]
    counted: bool


class Pipeline:
    """Runs a model's steps on workers.

    Attributes:
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
        mode: Local,
        explaining: Callable[[Sequence[torch.device], str, bool], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.settings = settings
        self._explaining = explaining
        self._mode = mode
        self._model = model
        self._compile_state = compile_state
        self._splitting = splitting
        self._optimized = optimized
        self._deferred = deferred_batch_norm
        self._compile_function = compile_function
        self.compiled = self._compiled()
        self._workers: Workers | None = None
        self._schedules: dict[Any, Scheduled] = {}
        self._lock = torch_private.ForkedLock()
        self._alive = CallsAlive()
        self._names = _positional_names(model)
        self._kept = KeptResults(model)

    def _compiled(self) -> dict[str, Callable[..., Any]]:
        return {kind: self._compile_function(function) for kind, function in functions_of(self._model).items()}

    def forward_backward(self, step_inputs: StepInputs, accumulate_gradients: bool = True) -> Any:
        """See :meth:`roundpipe_fx.CompiledModule.forward_backward`.

        Args:
            accumulate_gradients: whether gradients are added to those of parameters and inputs now, or when the
                returned loss is differentiated.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "forward_backward computes gradients, but autograd is off here (no_grad); call the model."
            )
        kind, loss_fn = "outputs" if step_inputs.return_outputs else "loss", step_inputs.loss_fn
        with self._lock, self._batch_norm():
            on_device = self._inputs_on_device(
                (step_inputs.args, step_inputs.kwargs, step_inputs.labels, step_inputs.microbatches), loss_fn
            )
            args, kwargs, labels, microbatches = on_device
            inputs = StepInputs(args=args, kwargs=kwargs, labels=labels, loss_fn=loss_fn, microbatches=microbatches)
            # Capture all microbatches before any of them runs: the schedule needs every microbatch's programs, and an
            # error of tracing must leave no gradient behind.
            captured, made, weights = self._captured(
                lambda: self._calls_of_step(inputs, kind), (args, kwargs, labels, loss_fn, kind, microbatches)
            )
            splits = made.splits
            receivers = receivers_of(captured.primals, splits, self._mode.receivers())
            losses = [find_loss_output(graph, loss_fn) for graph in captured.graphs]
            of_each = zip(captured.graphs, losses, captured.primals, weights, strict=True)
            tangents = [gradients_of_loss(*of_one) for of_one in of_each]
            updatable = self._mode.updatable
            with update_during_step(
                self._optimized, step_inputs.optimizer, step_inputs.synchronize, captured, updatable
            ) as updates:
                finished = self._run(captured, tangents, None, [], updates)
                concatenate_split_gradients(finished.gradients, splits)
                total = weighted_sum(
                    [of_batch[position] for of_batch, position in zip(finished.outputs, losses, strict=True)], weights
                )
                ready = receivers, captured.primals, finished.outputs, finished.gradients
                if not accumulate_gradients:  # to the inputs as they were before the step updated them
                    total = loss_with_gradients(total, *ready)
                outputs = self._model_outputs(captured, finished.outputs)
                merged = None
                if step_inputs.return_outputs:  # before gradients are handed over: it may be an error
                    parts = [map_leaves(lambda _, value: detach_if_tensor(value), output) for _, output in outputs]
                    merged = merge(parts, self._splitting.outputs, weights, made.rows)
                self._mode.before_gradients(captured)
                hand_to_autograd(*ready)
        return self._mode.to_model((total, merged) if step_inputs.return_outputs else total)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs; where autograd is on, all backwards run when they are differentiated."""
        with self._lock, self._batch_norm():
            args, kwargs = self._inputs_on_device((args, kwargs))
            make = functools.partial(self._calls_of_model, args, kwargs)
            try:
                captured, made, weights = self._captured(make, (args, kwargs), forwards_before_backwards=True)
            except NothingCompiled as uncomputed:
                # No graph was compiled, so there are no stages to run: a call for each microbatch is the step.
                self._optimized.updates.synchronize()
                made = make()
                outputs = [uncomputed.output, *(call() for call in made.calls[1:])]
                return self._mode.to_model(merge(outputs, self._splitting.outputs, made.weights, made.rows))
            training = any(program.tangents for program in captured.programs)
            # Without incoming gradients no backward can follow: nothing is saved, and the forwards are a complete run.
            if not training:
                finished = self._run(captured, [[] for _ in captured.programs], (ActionKind.FORWARD,), [])
                outputs = self._model_outputs(captured, finished.outputs)
                return self._mode.to_model(merge(outputs, self._splitting.outputs, weights, made.rows))
            # Two runs: the forwards now, the backwards when autograd asks for the first gradient. Autograd calls `run`
            # again then, with the values that the forwards left.
            run = functools.partial(self._run_part, captured)
            self._mode.refuse_backward_elsewhere(captured, self._scheduled)
            returned = ReturnedOutputs(captured.graphs)
            results, of_outputs = run_through_autograd(
                captured, made.splits, run, self._alive, returned, self._mode.receivers()
            )
            outputs = self._model_outputs(captured, results, of_outputs)
        merged = self._mode.to_model(merge(outputs, self._splitting.outputs, weights, made.rows))
        returned.note(of_outputs[0], outputs[0], merged)
        return merged

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TracedStep:
        """Compile without running anything: for forward_backward if there are ``labels`` or a ``loss_fn``, else for a
        call."""
        made: list[functools.partial[Any]] = []

        def noted(calls: _StepCalls) -> _StepCalls:
            made[:] = calls.calls  # of the last time: what was known to this rank alone is prepared again
            return calls

        loss_fn = kwargs.get("loss_fn")
        with self._lock, self._batch_norm():
            args, kwargs = self._inputs_on_device((args, kwargs), loss_fn)
            labels, microbatches = kwargs.get("labels"), kwargs.get("microbatches")
            batch = (args, kwargs)
            if labels is None and loss_fn is None and microbatches is None:
                make = lambda: noted(self._calls_of_model(args, kwargs))  # noqa: E731
                captured, *_ = self._captured(make, batch, forwards_before_backwards=True, runs=False)
                return TracedStep(captured, self._scheduled(captured, None).instructions, *made[0].args)
            ours = ("labels", "loss_fn", "microbatches")
            inputs = StepInputs(
                args=args,
                kwargs={name: value for name, value in kwargs.items() if name not in ours},
                labels=labels,
                loss_fn=loss_fn,
                microbatches=microbatches,
            )
            make = lambda: noted(self._calls_of_step(inputs, "loss"))  # noqa: E731
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
            forwards_before_backwards: whether all forwards are to run before all backwards.
            runs: whether they are to run.
        """
        made: list[_StepCalls] = []

        # `agreed` may call `capture` more than once, where a rank has to trace again: only the calls of the last time
        # count.
        def capture() -> CapturedCalls:
            made[:] = [make()]
            return self._capture_microbatches(made[0], forwards_before_backwards)

        agreed_on = batch, torch.is_grad_enabled()
        captured = self._mode.agreed(agreed_on, capture, self._scheduled, runs, self.settings.microbatches)
        # A sum over samples adds up over microbatches as it is; a mean is weighted by a microbatch's part of the rows.
        added = any(graph.loss_reduction == "sum" for graph in captured.graphs)
        return captured, made[0], [1.0] * len(made[0].weights) if added else made[0].weights

    def _calls_of_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _StepCalls:
        """A call for each microbatch."""
        self._refuse_jagged((args, kwargs))
        pieces = split_inputs(args, kwargs, self.settings.microbatches, self._splitting.inputs, self._names)
        calls = [functools.partial(self.compiled["model"], *piece) for piece in pieces]
        return self._step_calls(calls, pieces, self._split(args, kwargs, pieces), self._rows(args, kwargs, pieces))

    def _calls_of_step(self, step_inputs: StepInputs, kind: str) -> _StepCalls:
        """A call for each microbatch of a step with its loss."""
        args, kwargs, labels, loss_fn = step_inputs.args, step_inputs.kwargs, step_inputs.labels, step_inputs.loss_fn
        if step_inputs.microbatches is not None:
            return self._calls_of_microbatches(step_inputs.microbatches, loss_fn, kind)
        if labels is not None and loss_fn is None:
            kwargs, labels = {**kwargs, "labels": labels}, None  # a model that takes its labels itself
        self._refuse_jagged((args, kwargs))
        splitting, count = self._splitting, self.settings.microbatches
        # Labels are passed on since a list of inputs may be recognized as one of samples by the labels' size only.
        pieces = split_inputs(args, kwargs, count, splitting.inputs, self._names, labels, splitting.labels)
        check_batch_sizes(args, kwargs, labels, count, splitting.inputs, splitting.labels)
        targets = split_labels(labels, len(pieces), splitting.labels, (args, kwargs), splitting.inputs)
        calls = [
            functools.partial(self.compiled[kind], loss_fn, labels is not None, own_args, own_kwargs, label)
            for (own_args, own_kwargs), label in zip(pieces, targets, strict=True)
        ]
        splits = [*self._split(args, kwargs, pieces), *split_tensors(labels, targets, splitting.labels)]
        return self._step_calls(calls, pieces, splits, self._rows(args, kwargs, pieces))

    def _refuse_jagged(self, inputs: Any) -> None:
        if self._splitting.inputs is None:
            refuse_jagged(inputs)

    def _calls_of_microbatches(self, microbatches: Sequence[Any], loss_fn: Any, kind: str) -> _StepCalls:
        """A call for each microbatch that the caller has split."""
        split_already = make_microbatches(microbatches, self.settings.microbatches, loss_fn is not None)
        calls = [
            functools.partial(self.compiled[kind], loss_fn, one.labels is not None, one.args, one.kwargs, one.labels)
            for one in split_already
        ]
        pieces = [(one.args, one.kwargs) for one in split_already]
        rows = row_counts((), {}, pieces, list)  # of each, the first tensor's
        return self._step_calls(calls, pieces, [], rows)

    def _rows(self, args: Any, kwargs: Any, pieces: Sequence[tuple[Any, Any]]) -> list[int]:
        if len(pieces) == 1:
            return [1]  # what is not split has no rows
        return row_counts(args, kwargs, pieces, self._splitting.inputs)

    def _step_calls(
        self,
        calls: list[functools.partial[Any]],
        pieces: Sequence[tuple[Any, Any]],
        splits: list[SplitTensor],
        rows: list[int],
    ) -> _StepCalls:
        """Calls, with the weight of each one's loss in that of the batch, unless it reads the count of the batch."""
        summed = self.settings.loss_reduction == "sum" or len(pieces) == 1
        # Mean over the batch = sum of count_i / sum(counts) * mean over microbatch i.
        weights = [1.0 if summed else count / sum(rows) for count in rows]
        counted = any(kwargs.get(COUNT_OF_BATCH) is not None for _, kwargs in pieces)
        return _StepCalls(calls, splits, weights, rows, counted)

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

    def _workers_on(self, devices: tuple[torch.device, ...]) -> Workers:
        """The workers, which are made if there are none for these devices. Others end when nobody holds them."""
        if self._workers is None or self._workers.devices != devices:
            self._workers = Workers(devices)
        return self._workers

    def _inputs_on_device(self, inputs: Any, loss_fn: Any = None) -> Any:
        """Inputs where the graph is to run; notes whether the model is offloaded."""
        modules = [module for module in (self._model, loss_fn) if isinstance(module, nn.Module)]
        extra = tensors_of_sums(self._model) if self._deferred else ()
        # A model can be moved between steps, so where it is, is looked up before each one.
        before = self._mode
        self._mode = make_mode(before, modules, extra)
        if before.offloaded != self._mode.offloaded:
            self.compiled = self._compiled()  # guards do not check where the model is
        return self._mode.to_device(inputs)

    def _capture_microbatches(self, made: _StepCalls, forwards_before_backwards: bool) -> CapturedCalls:
        setting = StepSetting(
            structure=self._mode.structure,
            forwards_before_backwards=forwards_before_backwards,
            offloaded=self._mode.offloaded or self.settings.offloaded,
            counted=made.counted,
            sizes_differ=has_different_sizes([(call.args, call.keywords) for call in made.calls]),
        )
        devices = self._mode.worker_devices
        if devices and devices[0].type != "cpu":
            self._workers_on(devices)  # before a plan is made for the memory that is free
        # Nothing is updated yet: no tensor of an offloaded model needs memory on the device during the capture.
        with self._mode.calling({}):
            keep = torch_private.keep_users_exceptions
            noting = [
                functools.partial(
                    call_explaining_breaks, self._model, keep, call.func, self._model, *call.args, **call.keywords
                )
                for call in made.calls
            ]
            return capture_calls(noting, self._compile_state, setting)

    def _batch_norm(self) -> contextlib.AbstractContextManager[None]:
        return defer_statistics(self._model) if self._deferred else trace_cumulative_statistics(self._model)

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
        # The model's Python code behind the graph may read buffers, and has to see them as the step has updated them.
        updated = {
            id(of_batch[position]): of_batch[position]
            for program, of_batch in zip(captured.programs, captured.primals, strict=True)
            for position in program.mutations.values()
        }
        with self._mode.calling(updated):
            for index, (call, of_batch) in enumerate(zip(captured.calls, results, strict=True)):
                # Detached: the user's code behind the graph must not extend an autograd graph unknown to the step.
                returned = [value.detach() if isinstance(value, torch.Tensor) else value for value in of_batch]
                with return_results(returned, functools.partial(check_unchanged, captured, index)):
                    output = call()
                of_step = {} if differentiated is None else differentiated[index]
                pairs = [(returned[position], result) for position, result in of_step.items()]
                output, of_call = self._kept.replaced(captured.graphs[index], returned, pairs, output, count)
                outputs.append(output)
                kept.append(of_call)
        # One microbatch outside autograd cannot differ from others, so there is nothing to learn from it.
        if count > 1 or differentiated is not None:
            self._kept.learn(captured.graphs, kept)
        self._mode.finish(captured)
        return outputs

    def _run_part(
        self, captured: CapturedCalls, tangents: Sequence[Sequence[Any]], left: list[dict[int, Any]] | None
    ) -> Finished:
        """All forwards, or all backwards with what the forwards have saved."""
        with self._lock:
            finished = self._run(captured, tangents, (ActionKind.FORWARD,) if left is None else _BACKWARD, left or [])
            if left is not None:
                self._mode.before_gradients(captured)
            return finished

    def _run(
        self,
        captured: CapturedCalls,
        tangents: Sequence[Sequence[Any]],
        kinds: tuple[ActionKind, ...] | None,
        inherited: Sequence[dict[int, Any]],
        updating: StepUpdates | None = None,
    ) -> Finished:
        device = self._mode.generator_device(captured)
        streams = random_streams.random_streams(device, len(captured.programs), self._mode.first_stream)
        workers = self._workers_on(self._mode.worker_devices or (device,))
        updates = self._optimized.updates
        phase = "step" if kinds is None else "forward" if kinds == (ActionKind.FORWARD,) else "backward"
        training = any(program.tangents for program in captured.programs)
        with self._explaining(workers.devices, phase, training):
            finished = self._mode.run(
                workers, captured, kinds, self._scheduled, tangents, streams, inherited, updates, updating
            )
        random_streams.finish(device, streams)
        # Forwards and backwards that are two runs are one step on the timeline: the spans of the second are appended.
        whole = kinds != _BACKWARD or not captured.graphs[0].measured
        before = [] if whole else captured.graphs[0].measured[-1]
        captured.graphs[0].measured[:] = [join_spans(before, finished.spans)]
        return finished

    def _scheduled(self, captured: CapturedCalls, kinds: tuple[ActionKind, ...] | None) -> Scheduled:
        # Programs are cached by the compiler, so their identities are a key; a key per kind, because both halves of one
        # step are schedules of their own.
        key = (kinds, *(id(program) for program in captured.programs))
        if key not in self._schedules:
            self._schedules[key] = schedule_run(captured, kinds)
        return self._schedules[key]


def _positional_names(model: nn.Module) -> list[str]:
    """The names of a model's positional arguments, for messages."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # of a function that is not Python's
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional]
