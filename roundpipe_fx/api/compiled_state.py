"""The state of a compiled module besides the model: how it is compiled, its plans, and the compiled forward."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from roundpipe_fx import torch_private
from roundpipe_fx.api.around_by_ddp import check_not_inside, data_parallel_around, note_data_parallel
from roundpipe_fx.api.backend import Unused, evict_unused, evict_when_unused, make_backend
from roundpipe_fx.api.beside_graphs import BesideGraphs, beside_graphs_of, parameters_gathered
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.api.replanning import cut_alike, replanning
from roundpipe_fx.api.subclassing import forward_like
from roundpipe_fx.console.progress import working
from roundpipe_fx.distributed.own_state import process_pipeline
from roundpipe_fx.distributed.pytorch_stages import pytorch_stages
from roundpipe_fx.distributed.tensor_parallel import refuse_sharded_parts, refuse_sharded_step
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.pipelined_graph import with_optimizer
from roundpipe_fx.pipeline.settings import Pipelining, StepCompileState
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.pipeline.step.step import Pipeline, Splitting
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.bridge import TraceOnly, trace_only
from roundpipe_fx.runtime.optimizer_memory import NO_OPTIMIZER, sum_of
from roundpipe_fx.runtime.optimizer_parameters import OptimizerParameters
from roundpipe_fx.runtime.stage_updates import check_optimizer

__all__ = ["CompiledState", "NoPlanError", "has_cache"]


_BY_CONVENTION = Splitting()


class NoPlanError(AttributeError, RuntimeError):
    """There is no plan."""


class CompiledState:
    """A model's compiled form.

    Args:
        original: the model.
        options: how it is compiled.
        fullgraph: as for ``torch.compile``.
        dynamic: as for ``torch.compile``.
        optim_dtype: of the optimizer's parameters.
        pipelining: how microbatches are pipelined; ``None``: they are not.
        splitting: how batches are split and outputs put together.
        deferred_batch_norm: whether batch norm's statistics are updated once a step.
        mesh: the processes over which stages are distributed; ``None``: they are in this one.

    Attributes:
        own_options: whether it is compiled with options that another compilation, of a module around it, must not drop.
        compiled: a weak reference to the compiled model, which ``fully_shard`` may have been given.
        processes: this rank's part in a pipeline over processes; ``None`` without a mesh.
    """

    def __init__(
        self,
        original: nn.Module,
        options: Options,
        *,
        fullgraph: bool,
        dynamic: bool | None,
        optim_dtype: torch.dtype | None = None,
        pipelining: Pipelining | None = None,
        splitting: Splitting = _BY_CONVENTION,
        deferred_batch_norm: bool = False,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.original = original
        self.compiled: list[weakref.ref[nn.Module]] = []
        self.forward = forward_like(original)
        self.replaced: Callable[..., Any] | None = None
        self.ran = False
        self.stepped = False
        if isinstance(options.stages, tuple):
            options = dataclasses.replace(options, following=_following(original))
        self.options = options
        self.own_options = pipelining is not None or options != Options(following=options.following)
        self.fullgraph = fullgraph
        self.dynamic = dynamic
        self.plans: list[Plan] = []
        self.learned = Learned()
        self.optimizer = OptimizerParameters(original, optim_dtype)
        self.pipelining = pipelining
        self.splitting = splitting
        self.deferred_batch_norm = deferred_batch_norm
        self._pipeline: Pipeline | None = None
        self._instead: Callable[..., Any] | None = None
        self._parallel = torch_private.as_data_parallel(original)
        if pipelining is not None:
            check_not_inside(original)
            note_data_parallel()
        self.processes = process_pipeline(
            original, mesh, options, pipelining, splitting, fullgraph, dynamic, optim_dtype
        )
        self._optimizer_memory = pipelining.optimizer if pipelining is not None else NO_OPTIMIZER
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._called = False
        self._unused: Unused | None = None
        self._kept_cuts: dict[bool, Any] = {}
        self._is_new = True
        self.compile()

    @property
    def _dynamic_in_pipeline(self) -> bool | None:
        """As asked for. PyTorch cannot trace layers that ranks share out for sizes of any number, seen with 2.13."""
        if self.dynamic is None and self.processes is not None and self.processes.group.parts > 1:
            return False
        return self.dynamic

    def settings(self) -> dict[str, Any]:
        """Arguments for another."""
        return {
            "options": self.options,
            "fullgraph": self.fullgraph,
            "dynamic": self.dynamic,
            "optim_dtype": self.optimizer.dtype,
            "pipelining": self.pipelining,
            "splitting": self.splitting,
            "deferred_batch_norm": self.deferred_batch_norm,
        }

    def compile(self) -> None:
        """Recompile at the next call."""
        self._is_new = True
        torch_private.try_again()
        if self._unused is not None:
            self._unused()
        evict_unused()
        compile_state = StepCompileState(kept=self._kept_cuts, optimizer=self._optimizer_memory)
        self._compile_state = compile_state
        backend = make_backend(
            self.options,
            self.plans.append,
            self.learned,
            self.pipelining,
            compile_state,
            functools.partial(_beside_graphs, self.compiled),
        )
        self._unused = evict_when_unused(self, backend)
        if self.pipelining is None:
            # Its hooks run around it, as those of a compiled module's do.
            forward = self.original.forward
            if self._parallel is not None:
                forward = torch_private.module_forward(self._parallel)
            self._compiled = torch.compile(forward, backend=backend, fullgraph=self.fullgraph, dynamic=self.dynamic)
            return
        replaced = self._pipeline
        self._pipeline = Pipeline(
            model=self.original,
            settings=self.pipelining,
            compile_function=lambda function: torch.compile(
                function, backend=backend, fullgraph=True, dynamic=self._dynamic_in_pipeline
            ),
            compile_state=compile_state,
            splitting=self.splitting,
            deferred_batch_norm=self.deferred_batch_norm,
            optimized=self.optimizer,
            mode=self.processes or Local(self.pipelining.devices),
        )
        if replaced is not None:
            self._pipeline.take_over_workers(replaced)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward; or once, what is to run instead of it."""
        self.ran = True
        instead, self._instead = self._instead, None
        if instead is not None:
            return instead(args, kwargs)
        if self._parallel is None:
            return self._run_replanned(*args, **kwargs)
        return torch_private.data_parallel_forward(self._parallel, self._run_replanned, args, kwargs)

    def _run_replanned(self, *args: Any, **kwargs: Any) -> Any:
        return self._replanned(lambda: self._run(args, kwargs))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pipeline is not None:
            refuse_sharded_parts(self.original)
            if not torch.is_grad_enabled() and has_cache(args, kwargs):
                return self.for_generation(self.original).forward(*args, **kwargs)
            return self._pipeline.forward(args, kwargs)
        self._called = True
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.fullgraph:
            return self._compiled(*args, **kwargs)
        return torch_private.keep_users_exceptions(self._compiled, [*self.original.modules()], *args, **kwargs)

    def for_generation(self, model: nn.Module) -> nn.Module:
        """The module whose ``generate`` is called for that of the compiled model.

        Each call for a token writes to a cache, which has all rows: microbatches cannot. So a pipelined model generates
        without its pipeline.

        Args:
            model: the compiled model.

        Raises:
            RuntimeError: this process has only some of the parameters.
        """
        if self._pipeline is None:
            return model
        if self.processes is not None:
            raise RuntimeError(
                "generate() and calls with a cache need all of the model in one process, and with mesh= each has its "
                "own stages: save the model (model.save), and load it in a process that generates."
            )
        self.optimizer.updates.synchronize()
        return self.original

    def forward_backward(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        labels: Any,
        loss_fn: Callable[..., Any] | None,
        return_outputs: bool,
        optimizer: torch.optim.Optimizer | None = None,
        synchronize: bool = True,
        microbatches: Sequence[Any] | None = None,
    ) -> Any:
        """See :meth:`roundpipe_fx.CompiledModule.forward_backward`; ``model`` is the compiled model."""
        if optimizer is not None:
            self._know(optimizer)
        if self._pipeline is None:
            raise RuntimeError(
                "forward_backward needs a model that is compiled for microbatches: "
                "roundpipe_fx.compile(model, num_microbatches=…, devices=[…])."
            )

        refuse_sharded_step(model)

        def step(args: tuple[Any, ...], kwargs: dict[str, Any], hand_over: bool) -> Any:
            assert self._pipeline is not None  # recreated when it is replanned
            within = optimizer if hand_over else None
            return self._pipeline.forward_backward(
                args, kwargs, labels, loss_fn, return_outputs, hand_over, within, synchronize, microbatches
            )

        parallel = data_parallel_around(model, self)
        if parallel is None:
            return self._replanned(lambda: step(args, kwargs, hand_over=True))
        self._instead = lambda args, kwargs: self._replanned(lambda: step(args, kwargs, hand_over=False))
        try:
            result = parallel(*args, **kwargs)
        finally:
            self._instead = None
        loss = result[0] if return_outputs else result
        loss.backward()
        if optimizer is not None:
            self.optimizer.step(optimizer, is_async=False)
        return (loss.detach(), result[1]) if return_outputs else loss.detach()

    def step(
        self, step_fn: Callable[..., Any] | torch.optim.Optimizer, is_async: bool, *args: Any, **kwargs: Any
    ) -> None:
        """See :meth:`roundpipe_fx.CompiledModule.step`."""
        if isinstance(step_fn, torch.optim.Optimizer):
            self._know(step_fn)
        self.optimizer.step(step_fn, is_async, *args, **kwargs)

    def _know(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer, and count it in plans of an offloaded model's steps: those that are made from now on, and
        those that were made before it was known.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        check_optimizer(optimizer)
        if self.pipelining is None or self._optimizers.get(optimizer) == len(optimizer.state):
            return
        optimizers = [*{**self._optimizers, optimizer: 0}]
        memory = sum_of(self.optimizer.memory_of(one) for one in optimizers)
        pipelining = dataclasses.replace(self.pipelining, optimizer=memory)
        plans = [with_optimizer(plan, pipelining) for plan in self.plans]  # checks all before any is replaced
        self._optimizers[optimizer] = len(optimizer.state)
        self._optimizer_memory = self._compile_state.optimizer = memory
        self.plans[:] = plans

    def trace(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See :meth:`roundpipe_fx.CompiledModule.trace`; ``model`` is the compiled model."""
        if isinstance(kwargs.get("optimizer"), torch.optim.Optimizer):
            kwargs = dict(kwargs)
            self._know(kwargs.pop("optimizer"))
        with parameters_gathered(model), self._telling("the step is traced and planned"):
            if self._pipeline is not None:
                refuse_sharded_parts(self.original)
                if self.processes is not None:
                    self._trace_pipeline(args, kwargs)
                else:
                    cut_alike(lambda: self._trace_pipeline(args, kwargs), self.compile)
                return
            with contextlib.suppress(TraceOnly), trace_only():
                self._call(args, kwargs)
        self._called = True

    def _trace_pipeline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._pipeline is not None  # recreated when it is recompiled
        self._pipeline.trace(args, kwargs)

    def pytorch_stages(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PipelineStage]:
        """See :meth:`roundpipe_fx.CompiledModule.pytorch_stages`."""
        assert self._pipeline is not None and self.processes is not None
        with self._telling("the step is traced and planned"):
            traced = self._pipeline.trace(args, kwargs)
        return pytorch_stages(self.processes, traced)

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

    def _replanned(self, run: Callable[[], Any]) -> Any:
        """Run the model, or a step of it, on plans that know what earlier steps have shown."""
        devices = self._cuda_devices()
        budgeted = self.options.memory_budget is not None or (self.options.recompute is None and bool(devices))
        if self.pipelining is not None and self.pipelining.checkpoint is not None:
            budgeted = False
        with self._telling("the first step is traced, planned and run"):
            updates = self.optimizer.updates
            return replanning(run, self.compile, self.learned, devices, budgeted, self.processes, updates.repeatable)

    def _telling(self, what: str) -> AbstractContextManager[None]:
        """Tell of the first call, which takes long, since the model is traced and planned in it."""
        new, self._is_new = self._is_new, False
        return working(what) if new else contextlib.nullcontext()

    def _cuda_devices(self) -> list[torch.device]:
        if not torch.cuda.is_initialized():  # looking at parameters in every step takes longer
            return []
        parameter = next(self.original.parameters(), None)
        if parameter is not None and parameter.device.type == "cuda":
            return [parameter.device]
        offloaded = self.pipelining.devices[:1] if self.pipelining is not None else ()
        return [device for device in offloaded if device.type == "cuda"]


def _beside_graphs(compiled: Sequence[weakref.ref[nn.Module]]) -> BesideGraphs:
    """What FSDP2 and DDP do; not a method, since what Dynamo keeps must not keep the state."""
    models = [reference() for reference in compiled]
    return beside_graphs_of(model for model in models if model is not None)


def _following(model: nn.Module) -> dict[str, list[str]]:
    """For each module those that run after it: the later ones of the lists and sequences that it is in."""
    modules = dict(model.named_modules(remove_duplicate=False))
    following: dict[str, list[str]] = {}
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


_MODULE = "transformers.cache_utils"


def has_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a model is given a cache of Hugging Face's."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


def _is_cache(value: Any) -> bool:
    return any(cls.__module__ == _MODULE for cls in type(value).__mro__)
