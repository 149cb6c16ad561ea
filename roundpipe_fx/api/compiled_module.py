"""The compiled module: an ``nn.Module`` that stands for the user's and runs its compiled form."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from roundpipe_fx import torch_private
from roundpipe_fx.api.assumptions import Assumptions
from roundpipe_fx.api.backend import make_backend
from roundpipe_fx.api.dynamo_cache_eviction import drop_unused, when_unused
from roundpipe_fx.api.replanning import planning_anew
from roundpipe_fx.ir.options import Options, names_checked
from roundpipe_fx.pipeline.settings import Likeness, Pipelining, parse_pipelining
from roundpipe_fx.pipeline.step import Pipeline, Splitting
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.forward_calls import TraceOnly, outputs_of_programs, trace_only
from roundpipe_fx.runtime.optimizer_parameters import OptimizerParameters, in_optimizer_context
from roundpipe_fx.schedules import Schedule

__all__ = ["CompiledModule", "compile"]


@names_checked
def compile(
    model: nn.Module,
    *,
    stages: int | str | list[str] | tuple[str, ...] = "auto",
    recompute: str | None = None,
    memory_budget: int | float | str | None = None,
    cost: str = "roofline",
    stage_compiler: str | Callable[..., Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    optim_dtype: torch.dtype | None = None,
    devices: Sequence[torch.device | str] | None = None,
    num_microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    checkpoint: str | None = None,
    split_input: Any = None,
    split_label: Any = None,
    merge_output: Any = None,
    deferred_batch_norm: bool = False,
) -> CompiledModule:
    """Compile a model for training, in pipeline stages.

    The result is used in place of the model: same ``forward`` signature and outputs, same ``state_dict`` keys, same
    parameter objects; ``train()``, ``eval()`` and ``to()`` act on the model itself. Nothing is traced until the first
    call (or :meth:`CompiledModule.trace`); changed shapes recompile as ``torch.compile`` does.

    Args:
        model: any module that ``torch.compile`` can trace.
        stages: how many pipeline stages; ``"auto"``: one stage a device, on one device as few as keep each within 1.1
            times the heaviest segment; or the names of the modules (as in ``model.named_modules()``) at which stages
            begin.
        recompute: ``"none"``: everything that the backward reads is saved. ``"full"``: each stage saves only what
            enters it and what must not be asked twice (``nonzero``, ``item``, routing), the rest is computed again.
            ``None``: as ``memory_budget`` says; without one as ``"none"``.
        memory_budget: the most bytes that a step may allocate at one time beyond what was allocated when it began, from
            the forward's beginning to the backward's end, new gradients included: an ``int``, a size like ``"6GiB"``,
            or a share in [0, 1] of the way from the least that can be reached to nothing recomputed. ``None``: on CUDA
            90 % of the memory that is free at the first step, unless ``recompute`` is given; on the CPU no limit.
        cost: how operations are priced: ``"roofline"`` (modelled, always the same) or ``"measured"`` (timed on the
            device once, kept on disk).
        stage_compiler: ``"eager"``, ``"inductor"``, or a callable ``(GraphModule, example_inputs) -> callable``.
            ``None``: eager on the CPU, Inductor on CUDA.
        fullgraph: make a graph break an error, which names the user's line, instead of a warning.
        dynamic: as for ``torch.compile``.
        optim_dtype: the optimizer works on copies of the parameters in this dtype (``torch.float32`` for a model in
            bfloat16): see :meth:`CompiledModule.optim_parameters` and :meth:`CompiledModule.step`. ``None``: on the
            parameters themselves.
        devices: run pipelined, one worker on each; a device may be named several times (``["cpu", "cpu"]`` are two
            workers that divide the cores). The model stays where it is. On a GPU: stages on other devices get copies
            of their parameters for each step. On the CPU, with GPUs here: stages get what they read when they run and
            while they do, gradients go back, and inputs and outputs are moved; a budget counts all that.
        num_microbatches: into how many microbatches a batch is split; twice the number of devices by default.
        schedule: ``"gpipe"``, ``"1f1b"`` (the default), ``"interleaved"``, ``"zero_bubble"``, ``"roundpipe"`` (the
            default where the model lies on the CPU and the devices are GPUs), ``"auto"`` (the one whose simulated step
            is shortest within the budget), or a :class:`roundpipe_fx.Schedule`.
        checkpoint: which microbatches are recomputed when pipelined: ``"always"`` all, ``"except_last"`` all but the
            last, ``"never"`` none. ``None``: as ``recompute`` and ``memory_budget`` say; the budget is then a device's.
        split_input: how inputs are split into microbatches: ``None`` (tensors along dimension 0, all else is the same
            for each), (specs of args, specs of kwargs) as of ``torch.distributed.pipelining``, or a callable
            ``(args, kwargs, count) -> (list of args, list of kwargs)``.
        split_label: the same for labels: a spec or a callable ``(labels, count) -> list``.
        merge_output: how outputs are put together: ``None`` (tensors are concatenated along dimension 0, losses
            summed), specs, or a callable that gets the list.
        deferred_batch_norm: update the running statistics of batch norm once a step, from all microbatches, and not
            once a microbatch.

    Raises:
        TypeError: ``model`` is not a module, or an option has a wrong type.
        ValueError: an option has an unknown value. The first call raises :class:`InfeasibleBudgetError` (a
            ``ValueError``) where the budget cannot be met, before anything runs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"roundpipe_fx.compile takes an nn.Module, not {type(model).__name__}; "
            'for a function use torch.compile(fn, backend="roundpipe_fx").'
        )
    options = Options.parse(
        {
            "stages": stages,
            "recompute": recompute,
            "memory_budget": memory_budget,
            "cost": cost,
            "stage_compiler": stage_compiler,
        }
    )
    pipelining = parse_pipelining(
        devices, num_microbatches, schedule, checkpoint, options.stages, options.recompute, options.memory_budget
    )
    splitting = Splitting(split_input, split_label, merge_output)
    if pipelining is None and (splitting != Splitting() or deferred_batch_norm):
        raise ValueError(
            "split_input, split_label, merge_output and deferred_batch_norm are of microbatches: give num_microbatches "
            "or devices too."
        )
    return CompiledModule(
        model,
        options,
        fullgraph=fullgraph,
        dynamic=dynamic,
        optim_dtype=optim_dtype,
        pipelining=pipelining,
        splitting=splitting,
        deferred_batch_norm=deferred_batch_norm,
    )


_OWN = (
    "_original",
    "_options",
    "_fullgraph",
    "_dynamic",
    "_plans",
    "_assumptions",
    "_optimizer",
    "_pipelining",
    "_splitting",
    "_deferred_batch_norm",
    "_pipeline",
    "_run",
    "_unused",
    "_replaced_forward",
    "_called",
)


_BY_CONVENTION = Splitting()


class CompiledModule(nn.Module):
    """A model compiled by :func:`compile`. Everything but ``forward`` is the model's own."""

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
    ) -> None:
        own = self.__dict__
        own["_original"] = original
        mode = original.training
        super().__init__()  # sets training, which is the model's own
        original.training = mode
        if isinstance(options.stages, tuple):
            options = dataclasses.replace(options, following=_following(original))
        own["_options"] = options
        own["_fullgraph"] = fullgraph
        own["_dynamic"] = dynamic
        own["_plans"] = []
        own["_called"] = False
        # The very dictionaries of the model: parameters, buffers and submodules are the model's, now and later.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[name] = getattr(original, name)
        own["_assumptions"] = Assumptions()
        own["_optimizer"] = OptimizerParameters(original, optim_dtype)
        own["_pipelining"] = pipelining
        own["_splitting"] = splitting
        own["_deferred_batch_norm"] = deferred_batch_norm
        own["_pipeline"] = None
        own["_unused"] = None
        self._compile()
        own["_replaced_forward"] = None

    def _compile(self) -> None:
        """Compile anew at the next call."""
        own = self.__dict__
        torch_private.try_again()
        if own["_unused"] is not None:
            own["_unused"]()
        drop_unused()
        if own["_pipelining"] is not None:
            self._compile_pipeline()
            return
        backend = make_backend(own["_options"], own["_plans"].append, own["_assumptions"])
        own["_unused"] = when_unused(self, backend)
        own["_run"] = torch.compile(
            own["_original"], backend=backend, fullgraph=own["_fullgraph"], dynamic=own["_dynamic"]
        )

    def _compile_pipeline(self) -> None:
        own = self.__dict__
        likeness = Likeness()
        backend = make_backend(own["_options"], own["_plans"].append, own["_assumptions"], own["_pipelining"], likeness)
        own["_unused"] = when_unused(self, backend)
        if own["_pipeline"] is not None:
            own["_pipeline"].close()
        own["_pipeline"] = Pipeline(
            own["_original"],
            own["_pipelining"],
            lambda function: torch.compile(function, backend=backend, fullgraph=True, dynamic=own["_dynamic"]),
            likeness,
            own["_splitting"],
            own["_deferred_batch_norm"],
        )

    def forward_backward(
        self,
        *args: Any,
        labels: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        return_outputs: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run forward and backward of all microbatches, as scheduled, and add to the parameters' ``.grad``.

        ::

            loss = model.forward_backward(x, labels=y, loss_fn=loss_fn)
            optimizer.step()

        Args:
            *args: for the model; split into microbatches.
            labels: for ``loss_fn``; split likewise. Without ``loss_fn`` they go to the model as its own ``labels``.
            loss_fn: ``(output, labels) -> loss``, without labels ``(output) -> loss``: a tensor of one number. Without
                it the model's output is its loss, or has it as ``.loss`` or as its first item.
            return_outputs: whether to return the model's outputs too, merged and detached.
            **kwargs: for the model; split into microbatches.

        Returns:
            the sum of the microbatches' losses, detached; or (loss, outputs). Gradients are of that sum: of a loss that
            is a mean over a microbatch, divide by the number of microbatches for the mean over the batch.

        Raises:
            RuntimeError: the model was compiled without ``devices``, ``num_microbatches``, ``schedule`` and
                ``checkpoint``; or autograd is off.
            ValueError: batch sizes differ, or the loss is not one number that can be differentiated.
        """
        if self._pipeline is None:
            raise RuntimeError(
                "forward_backward needs a model that is compiled for microbatches: "
                "roundpipe_fx.compile(model, num_microbatches=…, devices=[…])."
            )
        return _planning_anew(
            self, lambda: self._pipeline.forward_backward(args, kwargs, labels, loss_fn, return_outputs)
        )

    @property
    def training(self) -> bool:
        """The model's training mode."""
        return self._original.training

    @training.setter
    def training(self, mode: bool) -> None:
        self._original.training = mode

    @property
    def forward(self) -> Callable[..., Any]:
        """The compiled forward, with the signature of the model's own; or what it was replaced by."""
        # Made when asked for: kept, it would hold the model that it is of, which then only garbage collection ends.
        replaced = self.__dict__["_replaced_forward"]
        return replaced or functools.wraps(self._original.forward)(functools.partial(_forward, self))

    @forward.setter
    def forward(self, forward: Callable[..., Any]) -> None:
        self._replaced_forward = forward

    @property
    def plan(self) -> Plan:
        """The latest plan; of training where there is one.

        Raises:
            RuntimeError: nothing has been compiled: there was no call yet, or the model ran eagerly; the message says
                why.
        """
        if not self._plans:
            raise RuntimeError(self._why_no_plan())
        trained = [plan for plan in self._plans if plan.training]
        return (trained or self._plans)[-1]

    def _why_no_plan(self) -> str:
        if not self._called:
            return (
                "there is no plan before the model is compiled: call the model once, or model.trace(*args, **kwargs)."
            )
        outside = self._assumptions.steps.outside
        disabled = torch_private.why_disabled(self._original.forward)
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

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans made so far: one a graph (several where the graph breaks), shape and mode."""
        return tuple(self._plans)

    def trace(self, *args: Any, **kwargs: Any) -> Plan:
        """Compile for these arguments without running anything, and return the plan.

        Where the graph breaks only the part before the first break is compiled. No buffer and no generator changes.

        A pipelined model is planned as :meth:`forward_backward` runs it if ``labels`` or ``loss_fn`` are given, else as
        a call does, with all forwards before all backwards.
        """
        if self._pipeline is not None:
            self._pipeline.trace(args, kwargs)
            return self.plan
        try:
            with trace_only():
                _call(self, args, kwargs)
        except TraceOnly:
            pass
        self.__dict__["_called"] = True
        return self.plan

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name in self.__dict__ or isinstance(getattr(type(self), name, None), property):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._original)})

    def __repr__(self) -> str:
        return f"CompiledModule({self._original!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        self._optimizer.synchronize()
        return _rebuild(copy.deepcopy(self._original, memo), self._settings(), self._optimizer.state())

    def __reduce__(self) -> tuple[Any, ...]:
        self._optimizer.synchronize()
        return _rebuild, (self._original, self._settings(), self._optimizer.state())

    def _settings(self) -> dict[str, Any]:
        return {
            "options": self._options,
            "fullgraph": self._fullgraph,
            "dynamic": self._dynamic,
            "optim_dtype": self._optimizer.dtype,
            "pipelining": self._pipelining,
            "splitting": self._splitting,
            "deferred_batch_norm": self._deferred_batch_norm,
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As the model's own; inside :class:`roundpipe_fx.OptimizerCtx` :meth:`optim_named_parameters`."""
        if in_optimizer_context() and recurse:
            return self.optim_named_parameters(prefix, remove_duplicate)
        return super().named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As the model's own; inside :class:`roundpipe_fx.OptimizerCtx` :meth:`optim_parameters`."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters for an optimizer: copies in ``optim_dtype``, of the parameters that require grad.

        Without ``optim_dtype`` they are the model's own.
        """
        return self._optimizer.named(prefix, remove_duplicate)

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters for an optimizer: see :meth:`optim_named_parameters`."""
        return (parameter for _, parameter in self.optim_named_parameters())

    def step(self, step_fn: Callable[..., Any], is_async: bool = False, *args: Any, **kwargs: Any) -> None:
        """Run a step of an optimizer that was made from :meth:`optim_parameters`.

        ::

            model.step(lambda: (optimizer.step(), optimizer.zero_grad()))

        The model's gradients are moved to the optimizer's parameters (added to what is there), ``step_fn`` is called,
        and the results are copied back into the model. Without ``optim_dtype`` it is only called.

        Args:
            step_fn: called with the arguments that follow.
            is_async: call it in a thread of its own and return at once. The model then has the parameters of one step
                before, until the next ``step`` or :meth:`synchronize`, which also raise what ``step_fn`` raised.
                RoundPipe does so unless told otherwise.
            *args: for ``step_fn``.
            **kwargs: for ``step_fn``.

        Raises:
            RuntimeError: a parameter has a gradient, and the optimizer was never given its copy.
        """
        self._optimizer.step(step_fn, is_async, *args, **kwargs)

    def synchronize(self) -> None:
        """Wait for a step that runs asynchronously, and copy the optimizer's parameters into the model."""
        self._optimizer.synchronize()

    def train(self, mode: bool = True) -> CompiledModule:
        """As the model's own."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> CompiledModule:
        self._original._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> CompiledModule:
        """As the model's own: ``fn`` sees the model, not this wrapper."""
        self._original.apply(fn)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> CompiledModule:
        """As the model's own."""
        self._original.requires_grad_(requires_grad)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own. With ``optim_dtype`` the optimizer's parameters go with it, as metadata.

        ``torch.save`` and ``torch.load`` keep metadata; formats of tensors alone do not.
        """
        self._optimizer.synchronize()
        state = self._original.state_dict(*args, **kwargs)
        copies = self._optimizer.state()
        if copies and hasattr(state, "_metadata"):
            state._metadata[_OPTIMIZER] = copies
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As the model's own. The optimizer's parameters are loaded too, or copied anew if ``state_dict`` has none."""
        loaded = self._original.load_state_dict(state_dict, *args, **kwargs)
        self._optimizer.load((getattr(state_dict, "_metadata", None) or {}).get(_OPTIMIZER, {}))
        return loaded


_OPTIMIZER = "roundpipe_fx.optim_parameters"
"""Where a state dict's metadata has the optimizer's parameters."""


def _forward(model: CompiledModule, /, *args: Any, **kwargs: Any) -> Any:
    def run() -> Any:
        if model._pipeline is not None:
            return model._pipeline.forward(args, kwargs)
        return _run(model, args, kwargs)

    return _planning_anew(model, run)


def _planning_anew(model: CompiledModule, run: Callable[[], Any]) -> Any:
    """Run the model, or a step of it, on plans that know what earlier steps have shown."""
    parameter = next(model._original.parameters(), None)
    devices = [parameter.device] if parameter is not None and parameter.device.type == "cuda" else []
    if not devices and model._pipelining is not None:
        devices = [device for device in model._pipelining.devices[:1] if device.type == "cuda"]  # of an offloaded model
    budgeted = model._options.memory_budget is not None or (model._options.recompute is None and bool(devices))
    if model._pipelining is not None and model._pipelining.checkpoint is not None:
        budgeted = False
    return planning_anew(run, model._compile, model._assumptions, devices, budgeted)


def _run(model: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model.__dict__["_called"] = True
    with outputs_of_programs() as returned:
        outputs = _call(model, args, kwargs)
    # A language model returns logits beside the loss, and nobody differentiates them: autograd would make zeros of
    # their size and keep them until the backward has read them.
    for output in tree_leaves(outputs) if torch.is_grad_enabled() else ():
        if output in returned:
            torch_private.leave_unused_gradients_out(output)
    return outputs


def _call(model: CompiledModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not model._fullgraph:
        return model._run(*args, **kwargs)
    return torch_private.keep_users_exceptions(model._run, [*model._original.modules()], *args, **kwargs)


def _following(model: nn.Module) -> dict[str, list[str]]:
    """For each module those that run after it: the later ones of the lists and sequences that it is in."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, list[str]] = {}
    for name in modules:  # parents come before their children
        parent, _, own = name.rpartition(".")
        after = list(found.get(parent, ()))
        if name and isinstance(modules[parent], (nn.Sequential, nn.ModuleList)):
            siblings = list(modules[parent]._modules)
            later = siblings[siblings.index(own) + 1 :]
            after = [*(f"{parent}.{sibling}" if parent else sibling for sibling in later), *after]
        elif name:
            after = []
        found[name] = after
    return found


def _rebuild(original: nn.Module, settings: dict[str, Any], copies: Mapping[str, torch.Tensor]) -> CompiledModule:
    model = CompiledModule(original, **settings)
    model._optimizer.load(copies)
    return model
