"""The parameters that an optimizer works on, where they are not the model's own: RoundPipe's master copies.

A model in bfloat16 trains well only if its optimizer adds small updates up in float32. So the optimizer is given
*optimizer parameters*: float32 copies. After each backward the model's gradients move to them, the optimizer steps, and
the result is rounded back into the model.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from roundpipe_fx.runtime.streams import on_stream

__all__ = ["OptimizerCtx", "OptimizerParameters", "in_optimizer_context"]


class _Local(threading.local):
    depth = 0


_local = _Local()


class OptimizerCtx:
    """Inside, ``parameters()`` and ``named_parameters()`` of a compiled model give the optimizer's parameters.

    ::

        model = roundpipe_fx.compile(model.bfloat16(), optim_dtype=torch.float32)
        with roundpipe_fx.OptimizerCtx():
            optimizer = torch.optim.AdamW(model.parameters())

    Of the thread; may be nested. Submodules of the model are not affected, nor are models compiled without
    ``optim_dtype``, whose optimizer parameters are their own.
    """

    def __enter__(self) -> OptimizerCtx:
        _local.depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        _local.depth -= 1


def in_optimizer_context() -> bool:
    """Whether this thread is inside an :class:`OptimizerCtx`."""
    return _local.depth > 0


class OptimizerParameters:
    """The optimizer's parameters of one model, by name.

    Args:
        model: whose.
        dtype: of the copies; ``None``: there are no copies, the optimizer works on the model's own parameters.

    Raises:
        TypeError: ``dtype`` is no floating-point dtype.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"optim_dtype must be a floating-point dtype like torch.float32, or None, not {dtype!r}.")
        self.dtype = dtype
        self._model = model
        self._copies: dict[str, nn.Parameter] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._pending: Future[Any] | None = None

    def named(self, prefix: str = "", remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Names, as in ``model.named_parameters()``, and parameters for an optimizer; of those that require grad."""
        first: dict[nn.Parameter, str] = {}
        for name, parameter in list(self._model.named_parameters(remove_duplicate=remove_duplicate)):
            if parameter.requires_grad:
                own = first.setdefault(parameter, name)
                yield f"{prefix}.{name}" if prefix else name, self._copy(own, parameter)

    def _copy(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if self.dtype is None:
            return parameter
        if name not in self._copies:
            self._copies[name] = nn.Parameter(parameter.detach().to(self.dtype, copy=True))
        return self._copies[name]

    def step(self, step_fn: Callable[..., Any], is_async: bool, *args: Any, **kwargs: Any) -> None:
        """Move gradients to the optimizer's parameters, run ``step_fn``, and copy the results back.

        Raises:
            RuntimeError: a parameter has a gradient, and the optimizer was never given it.
        """
        self._wait()
        if self.dtype is None:
            step_fn(*args, **kwargs)
            return
        if is_async:
            self._copy_back()
        self._move_gradients()
        if is_async:
            self._worker = self._worker or ThreadPoolExecutor(1, "roundpipe_fx optimizer")
            self._pending = self._worker.submit(self._on_streams_of_now(step_fn), *args, **kwargs)
        else:
            step_fn(*args, **kwargs)
            self._copy_back()

    def _on_streams_of_now(self, step_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The same for another thread, which has current streams of its own: on those that moved the gradients."""
        devices = {copy.device for copy in self._copies.values() if copy.device.type not in ("cpu", "meta")}
        streams = [torch.accelerator.current_stream(device) for device in devices]

        def step(*args: Any, **kwargs: Any) -> None:
            with contextlib.ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(on_stream(stream))
                step_fn(*args, **kwargs)

        return step

    def synchronize(self) -> None:
        """Wait for the step that is running, and copy its results back."""
        self._wait()
        self._copy_back()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _move_gradients(self) -> None:
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            if parameter.grad is not None and name not in self._copies:
                raise RuntimeError(
                    f"parameter {name!r} has a gradient, and no optimizer was given its copy: make the optimizer from "
                    "optim_parameters(), or inside OptimizerCtx(), after requires_grad is set."
                )
        for name, copy in self._copies.items():
            parameter = parameters[name]
            if parameter.grad is None:
                continue
            if copy.grad is None:
                copy.grad = parameter.grad.to(device=copy.device, dtype=copy.dtype, copy=True)
            else:
                copy.grad.add_(parameter.grad.to(copy.device))
            parameter.grad = None

    @torch.no_grad()
    def _copy_back(self) -> None:
        parameters = dict(self._model.named_parameters())
        for name, copy in self._copies.items():
            parameters[name].copy_(copy)

    def state(self) -> dict[str, torch.Tensor]:
        """The copies, by name; detached, not cloned."""
        return {name: copy.detach() for name, copy in self._copies.items()}

    @torch.no_grad()
    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take the copies from ``saved``; where it has none, from the model's parameters."""
        self._wait()
        if self.dtype is None:
            return
        for name, parameter in self._model.named_parameters():
            if name in saved or name in self._copies:
                self._copy(name, parameter).copy_(saved.get(name, parameter))
