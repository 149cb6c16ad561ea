"""The state of a compiled module besides the model: how it is compiled, its plans, and the compiled forward."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from roundpipe_fx import torch_private
from roundpipe_fx.api.backend import Backend, Unused, evict_unused, evict_when_unused, make_backend
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.api.plans_of_modules import add_plan
from roundpipe_fx.api.replanning import run_with_replanning
from roundpipe_fx.api.subclassing import forward_like
from roundpipe_fx.api.wrapper_memory import WrapperMemory, parameters_gathered, wrapper_memory_of
from roundpipe_fx.console.progress import working
from roundpipe_fx.distributed.process_pipeline import ProcessPipeline
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import Pipelining, StepCompileState
from roundpipe_fx.pipeline.step.step import StepInputs
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.bridge import TraceOnly, trace_only
from roundpipe_fx.runtime.optimizer_parameters import OptimizerParameters
from roundpipe_fx.runtime.stage_updates import check_optimizer

T = TypeVar("T", bound=torch.Tensor)


class NoPlanError(AttributeError, RuntimeError):
    """There is no plan."""


class CompiledState:
    """A model's compiled form, on one device.

    Args:
        options: how it is compiled.
        optim_dtype: of the optimizer's parameters.

    Attributes:
        own_options: whether it is compiled with options that another compilation, of a module around it, must not drop.
        compiled: a weak reference to the compiled model, which ``fully_shard`` may have been given.
        process_methods: names of methods of a compiled module that every such model has, whatever the model's own.
    """

    process_methods: Collection[str] = ()

    def __init__(
        self,
        original: nn.Module,
        options: Options,
        *,
        fullgraph: bool,
        dynamic: bool | None,
        optim_dtype: torch.dtype | None = None,
    ) -> None:
        self.original = original
        self.compiled: list[weakref.ref[nn.Module]] = []
        self.forward = forward_like(original)
        self.replaced: Callable[..., Any] | None = None
        self.ran = False
        self.stepped = False
        # Names of modules that follow each other tell where stages may begin.
        if isinstance(options.stages, tuple):
            options = dataclasses.replace(options, following=_find_following(original))
        self.options = options
        self.own_options = options != Options(following=options.following)
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self.plans: list[Plan] = []
        self.learned = Learned()
        self.learned.memory.models.add(original)
        self.optimizer = OptimizerParameters(original, optim_dtype)
        self._parallel = torch_private.as_data_parallel(original)
        self._called = False
        self._unused: Unused | None = None
        self._is_new = True
        self.compile()

    def settings(self) -> dict[str, Any]:
        """Arguments for another."""
        return {
            "options": self.options,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "optim_dtype": self.optimizer.dtype,
        }

    def compile(self) -> None:
        """Recompile at the next call."""
        # Its hooks run around it, as those of a compiled module's do.
        forward = self.original.forward if self._parallel is None else torch_private.module_forward(self._parallel)
        backend = self._new_backend()
        self._compiled = torch.compile(forward, backend=backend, fullgraph=self.fullgraph, dynamic=self.dynamic)

    def _new_backend(
        self, pipelining: Pipelining | None = None, compile_state: StepCompileState | None = None
    ) -> Backend:
        """A backend that knows nothing of what was compiled so far, which is evicted."""
        self._is_new = True
        torch_private.try_again()
        # The old code is evicted before new code is compiled, or both would count against Dynamo's limit.
        if self._unused is not None:
            self._unused()
        evict_unused()
        wrapper_memory = functools.partial(_wrapper_memory, self.compiled)
        add = functools.partial(add_plan, self.plans)
        backend = make_backend(self.options, add, self.learned, pipelining, compile_state, wrapper_memory)
        self._unused = evict_when_unused(self, backend)
        return backend

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward."""
        self.ran = True
        if self._parallel is None:
            return self._call_with_replanning(*args, **kwargs)
        return torch_private.data_parallel_forward(self._parallel, self._call_with_replanning, args, kwargs)

    def _call_with_replanning(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_with_replanning(lambda: self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._called = True
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.fullgraph:
            return self._compiled(*args, **kwargs)
        return torch_private.keep_users_exceptions(self._compiled, self.original, *args, **kwargs)

    def for_generation(self, model: nn.Module) -> nn.Module:
        """The module whose ``generate`` is called for that of the compiled model."""
        return model

    def forward_backward(self, model: nn.Module, step_inputs: StepInputs) -> Any:
        """Refused.

        Raises:
            RuntimeError: always.
        """
        if step_inputs.optimizer is not None:
            self._register_optimizer(step_inputs.optimizer)
        raise RuntimeError(
            "forward_backward needs a model that is compiled for microbatches: "
            "roundpipe_fx.compile(model, num_microbatches=…, devices=[…])."
        )

    def step(
        self, step_fn: Callable[..., Any] | torch.optim.Optimizer, is_async: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See :meth:`roundpipe_fx.CompiledModule.step`."""
        if isinstance(step_fn, torch.optim.Optimizer):
            self._register_optimizer(step_fn)
        self.optimizer.step(step_fn, is_async, *args, **kwargs)

    def _register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer."""
        check_optimizer(optimizer)

    def trace(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See :meth:`roundpipe_fx.CompiledModule.trace`; ``model`` is the compiled model."""
        if isinstance(kwargs.get("optimizer"), torch.optim.Optimizer):
            kwargs = dict(kwargs)
            self._register_optimizer(kwargs.pop("optimizer"))
        with parameters_gathered(model):
            self.traced(args, kwargs)

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace and plan a step, and tell of it; returns what a pipeline has traced."""
        with self._log_first_call("the step is traced and planned"):
            return self._trace(args, kwargs)

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The exception ends the call when everything is captured; it is the normal end of a trace.
        with contextlib.suppress(TraceOnly), trace_only():
            self._call(args, kwargs)
        self._called = True

    def why_no_plan(self) -> str:
        """Why nothing has been compiled."""
        if not self._called:
            return (
                "there is no plan before the model is compiled: call the model once, or model.trace(*args, **kwargs)."
            )
        outside = self.learned.steps.outside
        disabled = torch_private.why_disabled(self.original.forward)
        if disabled is not None:
            why = f"its forward is not to be compiled ({disabled})"
        elif outside:
            why = "; ".join(f"{reason.rstrip('.')} ({line})" for line, reason in outside.items())
        else:
            why = (
                "there was nothing that Dynamo could compile: the model computes nothing, or all of it is kept from "
                "being compiled (torch.compiler.disable, TORCHDYNAMO_DISABLE, a dispatch mode that is active)"
            )
        return f"there is no plan: the model was called and ran eagerly, because {why}."

    def _run_with_replanning(self, run: Callable[[], Any]) -> Any:
        """Run the model, or a step of it, on plans that know what earlier steps have shown."""
        with self._log_first_call("the first step is traced, planned and run"):
            return self._replan(run, self._cuda_devices())

    def _replan(self, run: Callable[[], Any], devices: Sequence[torch.device]) -> Any:
        repeatable = self.optimizer.updates.repeatable
        return run_with_replanning(run, self.compile, self.learned, devices, self._is_budgeted(devices), repeatable)

    def _is_budgeted(self, devices: Sequence[torch.device]) -> bool:
        return self.options.memory_budget is not None or (self.options.recompute is None and bool(devices))

    def _log_first_call(self, action: str) -> AbstractContextManager[None]:
        """Tell of the first call, which takes long, since the model is traced and planned in it."""
        new, self._is_new = self._is_new, False
        return working(action) if new else contextlib.nullcontext()

    def _cuda_devices(self) -> list[torch.device]:
        if not torch.cuda.is_initialized():  # looking at parameters in every step takes longer
            return []
        parameter = next(self.original.parameters(), None)
        return [parameter.device] if parameter is not None and parameter.device.type == "cuda" else []

    def of_this_rank(self, named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Select the named tensors that are in this process: all."""
        return named

    def processes(self) -> ProcessPipeline:
        """This rank's part in a pipeline over processes.

        Raises:
            RuntimeError: there is none.
        """
        raise RuntimeError("the model was compiled without mesh=, so all of it is in this process.")

    def check_copyable(self) -> None:
        """Check that the compiled model can be copied and pickled, and wait for its updates.

        Raises:
            TypeError: it cannot.
        """
        self.optimizer.synchronize()

    def check_replicable(self) -> None:
        """Check that DistributedDataParallel may be around the compiled model.

        Raises:
            ValueError: it may not.
        """

    def clip_gradients(self, model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
        """See :meth:`roundpipe_fx.CompiledModule.clip_grad_norm_`; ``model`` is the compiled model."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[None]:
        """See :meth:`roundpipe_fx.CompiledModule.no_sync`."""
        return contextlib.nullcontext()

    def own_state(self, state: Any, prefix: str) -> Any:
        """A state dict of the model as one of the compiled model."""
        copies = self.optimizer.state()
        if copies and hasattr(state, "_metadata"):
            state._metadata[_OPTIMIZER] = copies
        return state

    def load_state(self, load: Callable[..., Any], state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the model, by its own function, and what it has for the optimizer."""
        self.optimizer.updates.synchronize()
        loaded = load(state, *args, **kwargs)
        self.optimizer.load((getattr(state, "_metadata", None) or {}).get(_OPTIMIZER, {}))
        return loaded


_OPTIMIZER = "roundpipe_fx.optim_parameters"
"""The key of the optimizer's parameters in a state dict's metadata."""


def _wrapper_memory(compiled: Sequence[weakref.ref[nn.Module]]) -> WrapperMemory:
    """Allocations of FSDP2 and DDP; not a method, since what Dynamo keeps must not keep the state."""
    models = [reference() for reference in compiled]
    return wrapper_memory_of(model for model in models if model is not None)


def _find_following(model: nn.Module) -> dict[str, list[str]]:
    """For each module those that run after it: the later ones of the lists and sequences that it is in."""
    modules = dict(model.named_modules(remove_duplicate=False))
    following: dict[str, list[str]] = {}
    # In a sequence of modules what follows a module are its later siblings, then whatever follows the parent.
    for name in modules:  # parents come before their children
        parent, _, part = name.rpartition(".")
        after = list(following.get(parent, ()))
        if name and isinstance(modules[parent], (nn.Sequential, nn.ModuleList)):
            siblings = list(modules[parent]._modules)
            later = siblings[siblings.index(part) + 1 :]
            after = [*(f"{parent}.{sibling}" if parent else sibling for sibling in later), *after]
        elif name:
            after = []
        following[name] = after
    return following
