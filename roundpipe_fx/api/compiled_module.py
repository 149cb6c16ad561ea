"""The compiled module: an object of a subclass of the model's own class, which runs its compiled form."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

from roundpipe_fx.api.compiled_state import CompiledState, NoPlanError
from roundpipe_fx.api.pipelined_state import PipelinedState, StateOverProcesses
from roundpipe_fx.api.roundpipe_arguments import translate_arguments
from roundpipe_fx.api.subclassing import make_sharing_instance
from roundpipe_fx.distributed import own_state
from roundpipe_fx.distributed.pytorch_stages import pytorch_stages
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.pipeline.step.step import StepInputs
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.optimizer_parameters import in_optimizer_context


class CompiledModule(nn.Module):
    """A model compiled by :func:`compile`: an instance of the model's own class, whose ``forward`` is compiled.

    All attributes are the model's. If the model has an attribute with the name of one of those below, it stays the
    model's; ``CompiledModule.step(model, …)`` and :func:`roundpipe_fx.plans` work all the same.
    """

    _state_of_roundpipe_fx: CompiledState

    def __init_subclass__(cls, **_arguments: Any) -> None:
        """Does not announce a generated subclass to the model's class, which may keep a registry of its subclasses."""

    def forward_backward(
        self,
        *args: Any,
        labels: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
        synchronize: bool = True,
        microbatches: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of all microbatches, as scheduled, and add to the parameters' ``.grad``.

        ::

            loss = model.forward_backward(x, labels=y, loss_fn=loss_fn)
            optimizer.step()

        ::

            loss = model.forward_backward(x, labels=y, loss_fn=loss_fn, optimizer=optimizer)

        The second form has the same results: the optimizer's step is part of it. On the host, where parameters of an
        offloaded model are, a stage's update begins when its last gradient has arrived, beside the backward of earlier
        stages.

        If DistributedDataParallel wraps the model (``ddp.module.forward_backward``), the step goes through DDP, which
        averages gradients as in a backward, except inside ``ddp.no_sync()``.

        Args:
            *args: for the model; split into microbatches.
            labels: for ``loss_fn``; split likewise. Without ``loss_fn`` they go to the model as its own ``labels``.
            loss_fn: ``(output, labels) -> loss``, without labels ``(output) -> loss``: a tensor with one element.
                Without it, the loss is the model's output, its ``loss`` (an attribute, or a key of a dict), or its
                first item.
            return_outputs: whether to return the model's outputs too, merged and detached.
            optimizer: made from :meth:`optim_parameters`; it steps with the gradients of this step, added to those in
                ``.grad``, and clears them: ``.grad`` is ``None`` afterwards. What needs all gradients before any
                update, as clipping by their norm or a ``GradScaler`` does, goes between ``forward_backward`` without it
                and :meth:`step`. Optimizers of ``torch.optim`` that treat every parameter by itself begin within the
                backward, for parameters on the CPU without hooks; any other update follows the backward.
            synchronize: whether to wait for all updates. If not, the next step or call waits for each stage's
                parameters before it reads them; whoever else reads them, or writes to them, must first call
                :meth:`synchronize`. ``state_dict`` of the model and of the optimizer do.
            microbatches: the batch, split already, instead of ``args``, ``kwargs`` and ``labels``: for each microbatch
                a dict of the model's keyword arguments (and ``labels``), or a tuple of its positional ones. There may
                be fewer than the model is compiled for. The mean weighs each by the rows of its first tensor.
            **kwargs: for the model; split into microbatches. RoundPipe's ``input_args=``, ``input_kwargs=`` and
                ``label=`` are taken as there, unless the model's own ``forward`` takes them.

        Returns:
            the batch's loss, detached; or (loss, outputs). It and its gradients are the mean of the microbatches',
            weighed by rows, or with ``loss_reduction="sum"`` their sum.

        Raises:
            ValueError: batch sizes differ, or the loss is not one number that can be differentiated, or
                ``fully_shard`` shards the model.
            TypeError: ``optimizer`` is none, or its step requires a closure; or an object among inputs, labels or
                outputs holds tensors, and no option tells how to split or merge it.
            RuntimeError: the model was compiled without ``devices``, ``num_microbatches``, ``schedule`` and
                ``checkpoint``; or autograd is off; or DistributedDataParallel wraps a module of which the model is a
                part, and would not average; or the model that it wraps has hooks itself.
        """
        state = self._state_of_roundpipe_fx
        args, kwargs, labels = translate_arguments(state.original.forward, args, kwargs, labels)
        if microbatches is not None and (args or kwargs or labels is not None):
            raise TypeError(
                "forward_backward was given microbatches and other inputs: all inputs of a microbatch, and its labels, "
                "belong to its dict in microbatches=[{…}, {…}]."
            )
        step_inputs = StepInputs(
            args=args,
            kwargs=kwargs,
            labels=labels,
            loss_fn=loss_fn,
            return_outputs=return_outputs,
            optimizer=optimizer,
            synchronize=synchronize,
            microbatches=microbatches,
        )
        return state.forward_backward(self, step_inputs)

    @property
    def plan(self) -> Plan:
        """The latest plan; one for training if there is one.

        Raises:
            RuntimeError: nothing has been compiled: there was no call yet, or the model ran eagerly; the message says
                why. It is an ``AttributeError`` too, so that ``hasattr`` is false.
        """
        # A model may have several plans (training and evaluation, several shapes): the last one for training is shown.
        plans = self._state_of_roundpipe_fx.plans
        if not plans:
            raise NoPlanError(self._state_of_roundpipe_fx.why_no_plan())
        trained = [plan for plan in plans if plan.training]
        return (trained or plans)[-1]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans so far: one per graph (several where the graph breaks), shape and mode."""
        return tuple(self._state_of_roundpipe_fx.plans)

    def trace(self, *args: Any, **kwargs: Any) -> Plan:
        """Compile for these arguments without running anything, and return the plan.

        Where the graph breaks only the part before the first break is compiled. No buffer and no generator changes.

        A pipelined model is planned as :meth:`forward_backward` runs it if ``labels`` or ``loss_fn`` are given, else as
        a call does, with all forwards before all backwards. With ``optimizer`` its host memory is counted.

        Args:
            *args: as for a call of the model; their values are not read.
            **kwargs: as for a call, or for :meth:`forward_backward`.

        Returns:
            the plan; where the graph breaks, that of the first part.
        """
        self._state_of_roundpipe_fx.trace(self, args, kwargs)
        return CompiledModule.plan.__get__(self)

    def compile(self, *_args: Any, **_kwargs: Any) -> None:
        """Refused: the model is compiled already.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(COMPILED.format("roundpipe_fx.compile"))

    @property
    def _compiled_call_impl(self) -> None:  # type: ignore[override]
        """Always ``None``: what ``compile()`` of the model creates, which takes precedence over ``forward``, is not
        shared."""

    def __getattr__(self, name: str) -> Any:
        # Python falls back to this method when a property raises AttributeError.
        if name == "plan" and not self._state_of_roundpipe_fx.plans:
            raise NoPlanError(self._state_of_roundpipe_fx.why_no_plan())  # Python asks here after the property's error
        return super().__getattr__(name)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name != "plan" or hasattr(self, "plan")]

    def __prepare_scriptable__(self) -> nn.Module:
        """The module that ``torch.jit.script`` compiles."""
        return self._state_of_roundpipe_fx.original

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        state = self._state_of_roundpipe_fx
        state.check_copyable()
        return _rebuild(copy.deepcopy(state.original, memo), state.settings(), state.optimizer.state())

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        state = self._state_of_roundpipe_fx
        state.check_copyable()
        return _rebuild, (state.original, state.settings(), state.optimizer.state())

    def _get_fsdp_state(self) -> Any:
        """Of a model that was sharded before it was compiled; one that was sharded afterwards has its own."""
        return self._state_of_roundpipe_fx.original._get_fsdp_state()  # type: ignore[operator]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As the model's own; inside :class:`roundpipe_fx.OptimizerCtx` :meth:`optim_named_parameters`.

        With a mesh, those of this rank's stages.

        Args:
            prefix: put before each name.
            recurse: whether parameters of submodules are included.
            remove_duplicate: whether a parameter with several names is given once.

        Returns:
            names and parameters.

        Raises:
            RuntimeError: with a mesh, before :meth:`trace` or the first step.
        """
        # While an optimizer is constructed, it is given the parameters that it is to update.
        if in_optimizer_context() and recurse:
            return self._state_of_roundpipe_fx.optimizer.named(prefix, remove_duplicate)
        named = super().named_parameters(prefix, recurse, remove_duplicate)
        return self._state_of_roundpipe_fx.of_this_rank(named)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """As the model's own; with a mesh, those of this rank's stages.

        Args:
            prefix: put before each name.
            recurse: whether buffers of submodules are included.
            remove_duplicate: whether a buffer with several names is given once.

        Returns:
            names and buffers.
        """
        named = super().named_buffers(prefix, recurse, remove_duplicate)
        return self._state_of_roundpipe_fx.of_this_rank(named)

    def load(self, path: str | Path, fill: Callable[[str, torch.Tensor], object] | None = None) -> None:
        """Read what this rank's stages need from safetensors files. Every rank must call it, after :meth:`trace`.

        Args:
            path: a folder as Hugging Face saves it (one file, or several with their index), or a file.
            fill: called with the name and the tensor of what the files do not have, such as buffers that are not
                saved; it writes the values.

        Raises:
            RuntimeError: the model was compiled without ``mesh``, or is not planned yet.
            KeyError: the files lack something, and there is no ``fill``; or a shape differs.
        """
        own_state.load(self._state_of_roundpipe_fx.processes(), path, fill)

    def save(self, path: str | Path) -> None:
        """Write the model as a Hugging Face folder, each rank the tensors of its stages. Every rank must call it.

        The first rank writes an index and a Hugging Face model's configuration. A tensor that several ranks have is
        written once, and so are sharded ones, whole. :meth:`load` and ``from_pretrained`` read the folder.

        Args:
            path: the folder, on a file system that all ranks see; weights of an earlier save are replaced.

        Raises:
            RuntimeError: there is no ``mesh``, plan, or value of a tensor yet; or another rank could not write.
            OSError: this rank could not write, or a ``SafetensorError`` says so; then no rank has replaced its file.
        """
        own_state.save(self._state_of_roundpipe_fx.processes(), path)

    def init_weights(self, fill: Callable[[str, torch.Tensor], object]) -> None:
        """Let a function write the parameters and buffers of this rank's stages. Every rank must call it.

        Generators are seeded for each tensor by its name and the first rank's ``torch.initial_seed()``: the values do
        not depend on the number of ranks.

        Args:
            fill: called with a tensor's name and the tensor, under ``no_grad``.

        Raises:
            RuntimeError: the model was compiled without ``mesh``, or is not planned yet.
        """
        own_state.initialize_own_tensors(self._state_of_roundpipe_fx.processes(), fill)

    def pytorch_stages(self, *args: Any, **kwargs: Any) -> list[PipelineStage]:
        """This rank's stages for ``torch.distributed.pipelining``, whose schedules run them. Every rank must call it.

        ::

            stages = model.pytorch_stages(tokens)
            schedule = Schedule1F1B(stages[0], n_microbatches=4, loss_fn=loss_fn)
            schedule.step(tokens, target=labels)  # on the first rank; without tokens on the others

        Stages begin where the plan's do. The ``submod`` of each holds the parameters and buffers of the stage, which
        are the model's own, under the model's names; autograd differentiates it. It is for microbatches of the traced
        shape, and for the model's current mode (training or evaluation).

        Args:
            *args: as for :meth:`trace`; the first stage is to be given the same by position.
            **kwargs: as for :meth:`trace`. Stages that read one of them are to be given it by keyword:
                ``schedule.step(…, attention_mask=mask)`` on every rank. With ``labels`` or ``loss_fn`` the last
                stage returns the loss, as a tensor of shape ``[1]``.

        Returns:
            the stages, first to last.

        Raises:
            RuntimeError: the model was compiled without ``mesh``, or has no values yet.
            ValueError: PyTorch's runtime cannot run these stages as planned; the message says why.
        """
        state = self._state_of_roundpipe_fx
        return pytorch_stages(state.processes(), state.traced(args, kwargs))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all ranks by their norm. Every rank must call it.

        Args:
            max_norm: the largest norm that they may have together.
            norm_type: of the norm.

        Returns:
            the norm before, bitwise equal to that of ``torch.nn.utils.clip_grad_norm_`` in one process.
        """
        return self._state_of_roundpipe_fx.clip_gradients(self, max_norm, norm_type)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context manager in which steps add to the gradients of this replica without averaging them over replicas.

        The first step outside of it averages what has been added, as with DistributedDataParallel. A call of the model
        must be inside for its ``backward()`` not to average. Without replicas nothing is averaged in any case. With
        ``shard="dp"`` each replica has whole gradients until then.

        Returns:
            the context manager.

        Raises:
            RuntimeError: parameters are sharded and there is a ``memory_budget``, which does not count them.
        """
        return self._state_of_roundpipe_fx.no_sync()

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters for an optimizer: copies in ``optim_dtype``, of the parameters that require grad.

        Without ``optim_dtype`` they are the model's own.

        Args:
            prefix: put before each name.
            remove_duplicate: whether a parameter with several names is given once.

        Returns:
            names and parameters.
        """
        return self._state_of_roundpipe_fx.optimizer.named(prefix, remove_duplicate)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters for an optimizer: see :meth:`optim_named_parameters`.

        Returns:
            the parameters.
        """
        return (parameter for _, parameter in self.optim_named_parameters())

    def step(
        self,
        step_fn: Callable[..., Any] | torch.optim.Optimizer,
        is_async: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Run a step of an optimizer that was made from :meth:`optim_parameters`.

        ::

            model.step(optimizer)  # or what it stands for:
            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        The model's gradients are moved to the optimizer's parameters (added to existing ones), ``step_fn`` is called,
        and the results are copied back into the model. Without ``optim_dtype``, ``step_fn`` is only called.

        Args:
            step_fn: called with the arguments that follow; or an optimizer.
            is_async: call it in a thread of its own and return at once. The model then has the parameters of one step
                before, until the next ``step`` or :meth:`synchronize`, which also raise what ``step_fn`` raised.
                In RoundPipe this is the default.
            *args: for ``step_fn``.
            **kwargs: for ``step_fn``.

        Raises:
            RuntimeError: a parameter has a gradient, and the optimizer was never given its copy.
            HostMemoryError: an optimizer is given that an offloaded model's host has no memory for.
        """
        self._state_of_roundpipe_fx.step(step_fn, is_async, *args, **kwargs)

    def synchronize(self) -> None:
        """Wait for updates that run asynchronously, and copy the optimizer's parameters into the model.

        Raises:
            BaseException: what an update has raised, once; gradients that it has not applied are in ``.grad``.
        """
        self._state_of_roundpipe_fx.optimizer.synchronize()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """As the model's own: ``to``, ``half``, ``cuda``. It waits for updates."""
        self._state_of_roundpipe_fx.optimizer.updates.synchronize()
        return super()._apply(fn, recurse)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own. With ``optim_dtype`` the optimizer's parameters go with it, as metadata.

        ``torch.save`` and ``torch.load`` keep metadata; formats of tensors alone do not. With a mesh, only what this
        rank's stages need.

        Args:
            *args: as for ``nn.Module.state_dict``.
            **kwargs: likewise.

        Returns:
            tensors by name, with the model's own keys.
        """
        self._state_of_roundpipe_fx.optimizer.synchronize()
        state = super().state_dict(*args, **kwargs)
        return self._state_of_roundpipe_fx.own_state(state, kwargs.get("prefix", ""))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the model's own. The optimizer's parameters are loaded too, or copied from the model's if ``state_dict``
        has none.

        Args:
            state_dict: tensors by name, as :meth:`state_dict` or the model's own returns them.
            *args: as for ``nn.Module.load_state_dict``.
            **kwargs: likewise.

        Returns:
            as of ``nn.Module.load_state_dict``: missing and unexpected keys.
        """
        return self._state_of_roundpipe_fx.load_state(super().load_state_dict, state_dict, *args, **kwargs)


_OWN = (
    "clip_grad_norm_",
    "forward_backward",
    "init_weights",
    "load",
    "no_sync",
    "plan",
    "plans",
    "pytorch_stages",
    "save",
    "trace",
    "optim_named_parameters",
    "optim_parameters",
    "step",
    "synchronize",
)
"""Attributes that a compiled module has in addition to the model's."""

COMPILED = (
    "the model is compiled already, by {}; compile a model once, with all options. The model that it was made from "
    "is still the eager one."
)
"""The text of an error; its gap is for the function that has compiled the model."""


def compiled_module(
    model: nn.Module,
    options: Options,
    *,
    pipelining: Pipelining | None = None,
    mesh: DeviceMesh | None = None,
    **settings: Any,
) -> CompiledModule:
    """A compiled module.

    Args:
        pipelining: how microbatches are pipelined; ``None``: they are not.
        mesh: the processes over which stages are distributed; ``None``: they are in this one.
        **settings: see :class:`CompiledState` and :class:`PipelinedState`.
    """
    state: CompiledState
    if pipelining is None:
        state = CompiledState(model, options, **settings)
    elif mesh is None:
        state = PipelinedState(model, options, pipelining=pipelining, **settings)
    else:
        state = StateOverProcesses(model, options, mesh=mesh, pipelining=pipelining, **settings)
    # Without memory, a model's own methods of these names would write to nothing.
    compiled = make_sharing_instance(
        model, CompiledModule, state, [name for name in _OWN if name not in state.process_methods]
    )
    state.compiled.append(weakref.ref(compiled))
    return compiled


def _rebuild(original: nn.Module, settings: dict[str, Any], copies: Mapping[str, torch.Tensor]) -> CompiledModule:
    model = compiled_module(original, **settings)
    model._state_of_roundpipe_fx.optimizer.load(copies)
    return model
