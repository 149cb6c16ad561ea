"""Optimizer parameters: copies of a model's parameters in another dtype, which RoundPipe calls master copies.

A model in bfloat16 trains well only if its optimizer accumulates small updates in float32. So the optimizer works on
float32 copies: after each backward the model's gradients are moved to them, the optimizer steps, and the result is
rounded back into the model's parameters. An asynchronous step runs in a thread of its own, and its result reaches the
model one step late::

    step(optimizer)              move gradients │ optimizer's step │ copy back
    step(fn, is_async=True)      wait for the step before │ copy its result back │ move gradients │ start fn in a thread
    synchronize()                wait for the step before │ copy its result back
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundpipe_fx.runtime.optimizer_memory import OptimizerMemory, optimizer_memory
from roundpipe_fx.runtime.stage_updates import FORKED_WITHIN, StageUpdates
from roundpipe_fx.runtime.streams import on_stream
from roundpipe_fx.torch_private import when_forked


class _Local(threading.local):
    depth = 0


_local = _Local()


class OptimizerCtx:
    """Context manager in which ``parameters()`` and ``named_parameters()`` of a compiled model return optimizer
    parameters.

    ::

        model = roundpipe_fx.compile(model.bfloat16(), optim_dtype=torch.float32)
        with roundpipe_fx.OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters())

    It applies to the current thread and may be nested. Submodules of the model are not affected. The optimizer
    parameters of a model that is compiled without ``optim_dtype`` are its own parameters.
    """

    def __enter__(self) -> OptimizerCtx:
        _local.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        _local.depth -= 1


def in_optimizer_context() -> bool:
    """Return whether the current thread is inside an :class:`OptimizerCtx`."""
    return _local.depth > 0


@dataclass
class _Step:
    """A step in another thread."""

    run: Callable[[], Any]
    future: Future[None] = field(default_factory=Future)
    failure: BaseException | None = None
    is_over: bool = False

    def __call__(self) -> None:
        try:
            self.run()
        except BaseException as error:  # handed to the caller's thread
            self.failure = error
        self.is_over = True
        self._tell()

    def _tell(self) -> None:
        if self.failure is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(self.failure)

    def forget_thread(self) -> None:
        """In a process that was forked: the thread, which may have held the future's lock, is the parent's."""
        if not self.is_over:
            self.failure = RuntimeError(FORKED_WITHIN)
        # In a forked child no worker will ever complete the parent's future: the child gets one that is complete.
        self.future = Future()
        self._tell()


class OptimizerParameters:
    """The optimizer's parameters of one model, by name.

    Args:
        dtype: dtype of the copies. ``None``: no copies; the optimizer works on the model's own parameters.

    Attributes:
        updates: updates of parameters that are on their way.

    Raises:
        TypeError: ``dtype`` is not a floating-point dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"optim_dtype must be a floating-point dtype like torch.float32, or None, not {dtype!r}.")
        self.dtype = dtype
        self.updates = StageUpdates()
        self._model = model
        self._copies: dict[str, nn.Parameter] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._pending: _Step | None = None
        when_forked(self, OptimizerParameters._forget_thread)

    def _forget_thread(self) -> None:
        self._worker = None
        if self._pending is not None:
            self._pending.forget_thread()

    def named(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, as in ``model.named_parameters()``, and optimizer parameters, of parameters that require grad."""
        first: dict[nn.Parameter, str] = {}
        for name, parameter in list(self._model.named_parameters(remove_duplicate=remove_duplicate)):
            if parameter.requires_grad:
                # Shared parameters have one copy, under the first of their names.
                first_name = first.setdefault(parameter, name)
                yield f"{prefix}.{name}" if prefix else name, self._copy(first_name, parameter)

    def _copy(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if self.dtype is None:
            return parameter
        if name not in self._copies:
            self._copies[name] = nn.Parameter(parameter.detach().to(self.dtype, copy=True))
        return self._copies[name]

    def targets(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """The parameters that an optimizer steps, as the model's parameter and what the optimizer has in its place, by
        identity of the model's.

        Raises:
            RuntimeError: the optimizer has parameters of the model of which there are copies for it.
        """
        named = dict(self._model.named_parameters())
        names_of_copies = {id(copy): named[name] for name, copy in self._copies.items()}
        pairs = [
            (names_of_copies.get(id(trained), trained), trained)
            for group in optimizer.param_groups
            for trained in group["params"]
        ]
        if self.dtype is not None:
            # An optimizer that was made outside of the context steps the model's bfloat16 parameters themselves, and
            # would lose the copies' updates.
            names = {id(parameter): name for name, parameter in named.items()}
            for parameter, target in pairs:
                if parameter is target and id(parameter) in names:
                    raise RuntimeError(_NO_COPY.format(names[id(parameter)], "is the optimizer's"))
        return {id(parameter): (parameter, target) for parameter, target in pairs if target.requires_grad}

    def memory_of(self, optimizer: torch.optim.Optimizer) -> OptimizerMemory:
        """The host memory of an optimizer of these parameters."""
        return optimizer_memory(optimizer, {id(parameter) for parameter in self._model.parameters()})

    def step(
        self, step_fn: Callable[..., Any] | torch.optim.Optimizer, is_async: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Move gradients to the optimizer parameters, run ``step_fn``, and copy the results back.

        Args:
            step_fn: steps the optimizer; or the optimizer, which then steps and clears its gradients.
            is_async: whether ``step_fn`` runs in another thread. Its results are then copied back at the next step.

        Raises:
            RuntimeError: a parameter has a gradient, but its optimizer parameter was never requested.
        """
        self._wait()
        if isinstance(step_fn, torch.optim.Optimizer):
            step_fn = _stepping(step_fn)
        if self.dtype is None:
            step_fn(*args, **kwargs)
            return
        if is_async:
            # The result of the step before: with ``is_async`` it reaches the model one step late, and this step's
            # gradients are moved before the worker starts.
            self._copy_back()
        self._move_gradients()
        if is_async:
            self._worker = self._worker or ThreadPoolExecutor(1, "roundpipe_fx optimizer")
            self._pending = _Step(functools.partial(self._on_streams_of_now(step_fn), *args, **kwargs))
            self._worker.submit(self._pending)
        else:
            step_fn(*args, **kwargs)
            self._copy_back()

    def _on_streams_of_now(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function for another thread, so that it runs on the streams that moved the gradients."""
        # PyTorch's current streams belong to a thread: the worker must enqueue behind what this thread has enqueued.
        devices = {copy.device for copy in self._copies.values() if copy.device.type not in ("cpu", "meta")}
        streams = [torch.accelerator.current_stream(device) for device in devices]

        def step(*args: Any, **kwargs: Any) -> None:
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(on_stream(stream))
                step_fn(*args, **kwargs)

        return step

    def synchronize(self) -> None:
        """Wait for an asynchronous step, and copy its results back."""
        self._wait()
        self._copy_back()

    def _wait(self) -> None:
        self.updates.synchronize()
        if self._pending is not None:
            # The step stays pending if this wait is interrupted: the next call waits for it once more.
            wait([self._pending.future])  # an interrupt here leaves it pending
            pending, self._pending = self._pending, None
            pending.future.result()

    def _move_gradients(self) -> None:
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            if parameter.grad is not None and name not in self._copies:
                raise RuntimeError(_NO_COPY.format(name, "has a gradient"))
        for name, copy in self._copies.items():
            parameter = parameters[name]
            if parameter.grad is None:
                continue
            if copy.grad is None:
                copy.grad = parameter.grad.to(device=copy.device, dtype=copy.dtype, copy=True)
            else:
                # Several backwards between two steps add up, as ``.grad`` of a parameter does.
                copy.grad.add_(parameter.grad.to(copy.device))
            # Freed at once, so that gradients in both dtypes exist for one parameter at a time.
            parameter.grad = None

    @torch.no_grad()
    def _copy_back(self) -> None:
        parameters = dict(self._model.named_parameters())
        for name, copy in self._copies.items():
            parameters[name].copy_(copy)

    def state(self) -> dict[str, torch.Tensor]:
        """The copies by name, detached but not cloned."""
        return {name: copy.detach() for name, copy in self._copies.items()}

    @torch.no_grad()
    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load the copies from ``saved`` or, where it lacks them, from the model's parameters."""
        self._wait()
        if self.dtype is None:
            return
        for name, parameter in self._model.named_parameters():
            # What a checkpoint lacks begins as a copy of the model's parameter.
            if name in saved or name in self._copies:
                self._copy(name, parameter).copy_(saved.get(name, parameter))


_NO_COPY = (
    "parameter {!r} {}, but no optimizer was given its copy: create the optimizer from optim_parameters(), or inside "
    "OptimizerCtx(), after requires_grad is set."
)


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step
