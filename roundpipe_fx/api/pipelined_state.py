"""The state of a compiled module that is pipelined, in this process or over several."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_fx.api.around_by_ddp import find_outer_ddp, note_data_parallel, refuse_inner_ddp
from roundpipe_fx.api.compiled_state import CompiledState, T
from roundpipe_fx.api.learned import Learned
from roundpipe_fx.api.replanning import replan_on_all_ranks, run_cut_alike
from roundpipe_fx.distributed import own_state
from roundpipe_fx.distributed.own_state import process_pipeline
from roundpipe_fx.distributed.process_pipeline import ProcessPipeline
from roundpipe_fx.distributed.tensor_parallel import refuse_sharded_parts, refuse_sharded_step
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.pipelined_graph import count_optimizer
from roundpipe_fx.pipeline.settings import Pipelining, StepCompileState, Structure
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.pipeline.step.step import Pipeline, Splitting, StepInputs
from roundpipe_fx.report.out_of_memory_text import PlannedMemory, planned_memory
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.optimizer_memory import sum_of

_BY_CONVENTION = Splitting()


class PipelinedState(CompiledState):
    """The compiled form of a model that is pipelined, by threads of this process.

    Args:
        options: how it is compiled.
        pipelining: how microbatches are pipelined.
        splitting: how batches are split and outputs put together.
        deferred_batch_norm: whether batch norm's statistics are updated once a step.
    """

    def __init__(
        self,
        original: nn.Module,
        options: Options,
        *,
        pipelining: Pipelining,
        splitting: Splitting = _BY_CONVENTION,
        deferred_batch_norm: bool = False,
        **settings: Any,
    ) -> None:
        self.pipelining = pipelining
        self.splitting = splitting
        self.deferred_batch_norm = deferred_batch_norm
        self._pipeline: Pipeline | None = None
        self._instead: Callable[..., Any] | None = None
        self._optimizer_memory = pipelining.optimizer
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._kept_cuts: dict[bool, Structure] = {}
        refuse_inner_ddp(original)
        note_data_parallel()
        super().__init__(original, options, **settings)
        self.own_options = True

    def settings(self) -> dict[str, Any]:
        """Arguments for another."""
        return {
            **super().settings(),
            "pipelining": self.pipelining,
            "splitting": self.splitting,
            "deferred_batch_norm": self.deferred_batch_norm,
        }

    def compile(self) -> None:
        """Recompile at the next call."""
        compile_state = StepCompileState(kept=self._kept_cuts, optimizer=self._optimizer_memory)
        self._compile_state = compile_state
        backend, dynamic = self._new_backend(self.pipelining, compile_state), self._dynamic()
        pipeline = Pipeline(
            model=self.original,
            settings=self.pipelining,
            compile_function=lambda function: torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic),
            compile_state=compile_state,
            splitting=self.splitting,
            deferred_batch_norm=self.deferred_batch_norm,
            optimized=self.optimizer,
            mode=self._mode(),
            explaining=functools.partial(_explaining, self.learned, self.plans),
        )
        # A backward of the replaced pipeline may still come: it needs the same threads and the same lock.
        if self._pipeline is not None:
            pipeline.take_over_workers(self._pipeline)
        self._pipeline = pipeline

    def _dynamic(self) -> bool | None:
        return self.dynamic

    def _mode(self) -> Local:
        return Local(self.pipelining.devices)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs steps; each recompilation makes another one."""
        assert self._pipeline is not None
        return self._pipeline

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward; or once, what is to run instead of it."""
        instead, self._instead = self._instead, None
        if instead is None:
            return super().run(args, kwargs)
        self.ran = True
        return instead(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_sharded_parts(self.original)
        # Generation calls the model token by token with a cache; a pipeline would be filled and drained for each of
        # them.
        if not torch.is_grad_enabled() and has_cache(args, kwargs):
            return self.for_generation(self.original).forward(*args, **kwargs)
        return self.pipeline.forward(args, kwargs)

    def for_generation(self, model: nn.Module) -> nn.Module:
        """The model itself: each call for a token writes to a cache, which has all rows, and microbatches cannot."""
        self.optimizer.updates.synchronize()
        return self.original

    def forward_backward(self, model: nn.Module, step_inputs: StepInputs) -> Any:
        """See :meth:`roundpipe_fx.CompiledModule.forward_backward`; ``model`` is the compiled model."""
        if step_inputs.optimizer is not None:
            self._register_optimizer(step_inputs.optimizer)
        refuse_sharded_step(model)
        parallel = find_outer_ddp(model, self)
        if parallel is None:
            return self._run_with_replanning(lambda: self.pipeline.forward_backward(step_inputs))

        # DDP calls the module's forward, which is diverted to the step: its hooks see the parameters' gradients as in
        # any backward.
        def step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            within = dataclasses.replace(step_inputs, args=args, kwargs=kwargs, optimizer=None)
            return self._run_with_replanning(lambda: self.pipeline.forward_backward(within, accumulate_gradients=False))

        self._instead = step
        try:
            result = parallel(*step_inputs.args, **step_inputs.kwargs)
        finally:
            self._instead = None
        loss = result[0] if step_inputs.return_outputs else result
        # DDP averages in the backward of the returned loss.
        loss.backward()
        if step_inputs.optimizer is not None:
            self.optimizer.step(step_inputs.optimizer, is_async=False)
        return (loss.detach(), result[1]) if step_inputs.return_outputs else loss.detach()

    def _register_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check an optimizer, and count it in plans of an offloaded model's steps: those that are made from now on, and
        those that were made before it was known.

        Raises:
            HostMemoryError: the host has no memory for it.
        """
        super()._register_optimizer(optimizer)
        # The state has grown since it was last counted (the first step has made it), or not.
        if self._optimizers.get(optimizer) == len(optimizer.state):
            return
        optimizers = [*{**self._optimizers, optimizer: 0}]
        memory = sum_of(self.optimizer.memory_of(each_optimizer) for each_optimizer in optimizers)
        pipelining = dataclasses.replace(self.pipelining, optimizer=memory)
        plans = [count_optimizer(plan, pipelining) for plan in self.plans]  # checks all before any is replaced
        self._optimizers[optimizer] = len(optimizer.state)
        self._optimizer_memory = self._compile_state.optimizer = memory
        self.plans[:] = plans

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_sharded_parts(self.original)
        return run_cut_alike(lambda: self.pipeline.trace(args, kwargs), self.compile)

    def _is_budgeted(self, devices: Sequence[torch.device]) -> bool:
        return self.pipelining.checkpoint is None and super()._is_budgeted(devices)

    def _cuda_devices(self) -> list[torch.device]:
        devices = super()._cuda_devices()
        if devices or not torch.cuda.is_initialized():
            return devices
        return [device for device in self.pipelining.devices[:1] if device.type == "cuda"]


class StateOverProcesses(PipelinedState):
    """The compiled form of a model of which each process has some stages.

    Args:
        options: how it is compiled.
    """

    process_methods = ("clip_grad_norm_", "init_weights", "load", "no_sync", "save")

    def __init__(self, original: nn.Module, options: Options, *, mesh: DeviceMesh, **settings: Any) -> None:
        self._mesh = mesh
        super().__init__(original, options, **settings)

    @functools.cached_property
    def _processes(self) -> ProcessPipeline:
        return process_pipeline(self.original, self._mesh, **self.settings())

    def processes(self) -> ProcessPipeline:
        """This rank's part in a pipeline over processes."""
        return self._processes

    def _dynamic(self) -> bool | None:
        """The user's choice; static sizes with tensor parallelism, as PyTorch 2.13 cannot trace symbolic ones."""
        return False if self.dynamic is None and self._processes.group.parts > 1 else self.dynamic

    def _mode(self) -> Local:
        return self._processes

    def for_generation(self, model: nn.Module) -> nn.Module:
        """None.

        Raises:
            RuntimeError: this process has only some of the parameters.
        """
        raise RuntimeError(
            "generate() and calls with a cache need all of the model in one process, and with mesh= each has its "
            "own stages: save the model (model.save), and load it in a process that generates."
        )

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        refuse_sharded_parts(self.original)
        return self.pipeline.trace(args, kwargs)

    def _replan(self, run: Callable[[], Any], devices: Sequence[torch.device]) -> Any:
        return replan_on_all_ranks(run, self.compile, self.learned, self._is_budgeted(devices), self._processes)

    def of_this_rank(self, named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Select the named tensors that this rank owns."""
        return own_state.select_own(self._processes, named)

    def check_copyable(self) -> None:
        """Refused.

        Raises:
            TypeError: always.
        """
        raise TypeError("a model that is distributed over processes cannot be copied or pickled: save its state_dict.")

    def check_replicable(self) -> None:
        """Refused.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "DistributedDataParallel cannot be around a model that was compiled with mesh=, of which each rank has the "
            "parameters of its own stages only. For replicas of the pipeline give the mesh a dimension 'dp': "
            "init_device_mesh(device, (replicas, stages), mesh_dim_names=('dp', 'pp')). Their gradients are averaged "
            "without DistributedDataParallel."
        )

    def clip_gradients(self, model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
        """Clip the gradients of all ranks together."""
        return own_state.clip_gradients(self._processes, max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[None]:
        """Of this rank's replica."""
        return self._processes.replication.no_sync()

    def own_state(self, state: Any, prefix: str) -> Any:
        """A state dict without the tensors of other ranks."""
        return own_state.select_own_state(self._processes, state, prefix)

    def load_state(self, load: Callable[..., Any], state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Copy what this rank owns from a state dict, which may have more."""
        return own_state.load_own_state(self._processes, state, args[0] if args else kwargs.get("strict", True))


@contextlib.contextmanager
def _explaining(
    learned: Learned, plans: Sequence[Plan], devices: Sequence[torch.device], phase: str, training: bool
) -> Iterator[None]:
    """Context manager in which workers run; not a method, since what is compiled must not keep the state.

    Args:
        plans: of the model; the latest one for training, or not, is that of the run.
        phase: what they run: ``"forward"``, ``"backward"`` or ``"step"``.
        training: whether there is a backward, now or later.
    """

    def planned() -> PlannedMemory | None:
        latest = next((plan for plan in reversed(plans) if plan.training is training), None)
        return planned_memory(latest, learned.share) if latest is not None else None

    if phase != "backward":
        learned.memory.begin(dict.fromkeys(devices))
    with learned.memory.explaining(phase, planned):
        yield


_CACHES = "transformers.cache_utils"
"""Of keys and values, which a language model that generates reads and extends in each call."""


def has_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Test for a cache of Hugging Face's among a model's arguments."""
    return any(cls.__module__ == _CACHES for value in (*args, *kwargs.values()) for cls in type(value).__mro__)
