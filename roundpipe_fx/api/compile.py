"""``roundpipe_fx.compile``: its options, checked, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from roundpipe_fx import torch_private
from roundpipe_fx.api.compiled_module import COMPILED, CompiledModule, compiled_module
from roundpipe_fx.compiler.run_passes import edit_passes
from roundpipe_fx.distributed.mesh import check_shard, devices_of, set_mesh
from roundpipe_fx.ir.options import Options, check_names
from roundpipe_fx.passes.entry import Pass
from roundpipe_fx.pipeline.settings import parse_pipelining
from roundpipe_fx.pipeline.step.step import Splitting
from roundpipe_fx.schedules import Schedule


@check_names
def compile(
    model: nn.Module,
    *,
    stages: int | str | list[str] | tuple[str, ...] = "auto",
    recompute: str | None = None,
    memory_budget: int | float | str | None = None,
    tiling: str | None = None,
    outputs: str = "auto",
    cost: str = "roofline",
    stage_compiler: str | Callable[..., Any] | None = None,
    inductor_options: Mapping[str, Any] | None = None,
    passes: Callable[[list[Pass]], Sequence[Pass]] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    optim_dtype: torch.dtype | None = None,
    devices: Sequence[torch.device | str] | None = None,
    mesh: DeviceMesh | None = None,
    shard: str | None = None,
    num_microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    checkpoint: str | None = None,
    split_input: Any = None,
    split_label: Any = None,
    merge_output: Any = None,
    loss_reduction: str = "mean",
    deferred_batch_norm: bool = False,
    host_budget: int | str | None = None,
    host_links: int | None = None,
) -> CompiledModule:
    """Compile a model for training, in pipeline stages.

    The result is used in place of the model: same ``forward`` signature and outputs, same ``state_dict`` keys, same
    parameter objects; ``train()``, ``eval()`` and ``to()`` act on the model itself. Nothing is traced until the first
    call (or :meth:`CompiledModule.trace`); changed shapes recompile as ``torch.compile`` does.

    Args:
        model: any module that ``torch.compile`` can trace.
        stages: how many pipeline stages; ``"auto"``: one stage a device; on one device, or one in each replica, as few
            as keep each within 1.1 times the heaviest segment, or, where Inductor compiles them and nothing is
            recomputed, as few as let repeated layers be compiled once; or the names of the modules (as in
            ``model.named_modules()``) at which stages begin.
        recompute: ``"none"``: everything that the backward reads is saved. ``"full"``: each stage saves only what
            enters it and the results of host synchronizations (``nonzero``, ``item``, routing); the rest is recomputed.
            ``None``: as ``memory_budget`` requires; without one, ``"none"``.
        memory_budget: the most bytes that a step may allocate at one time beyond what was allocated when it began, from
            the forward's beginning to the backward's end, new gradients included: an ``int``, a size like ``"6GiB"``,
            or a share in [0, 1] of the way from the least that can be reached to nothing recomputed. ``None``: on CUDA
            90 % of the memory that is free at the first step, unless ``recompute`` is given; on the CPU no limit.
        tiling: whether operations whose intermediate values are wide (the logits of a loss head, the inner width of an
            MLP, attention scores) may be carried out on one tile of rows after another. Sums over tiles round
            differently, so bitwise equality is promised only without tiles. ``None``: where a budget in bytes cannot be
            met otherwise; the plan says so. ``"auto"``: also where a step within the budget is then modelled to be
            shorter. ``"never"``.
        outputs: whether the caller still holds the model's outputs when the backward of the model's own loss begins:
            ``"held"`` (``outputs = model(**batch)``), ``"dropped"`` (``loss = model(**batch).loss``; on one device),
            ``"unread"`` (dropped, and nothing has read them), or ``"auto"``: as steps show; until one has, held, or,
            where the budget cannot be met so, dropped or unread. Plans count what is held; the plan says what it
            assumes. Over processes outputs are held.
        cost: how operations are priced: ``"roofline"`` (modelled, with rates of a table, or of a CUDA device that is
            calibrated once) or ``"measured"`` (each timed on the device once, kept on disk).
        stage_compiler: ``"eager"``, ``"inductor"``, or a callable ``(GraphModule, example_inputs) -> callable``.
            ``None``: eager on the CPU, Inductor on CUDA. A stage that Inductor cannot compile runs eagerly, with a
            warning, and the next plan is made for eager stages.
        inductor_options: settings of Inductor's (``torch._inductor.list_options()``) for stages that it compiles, as
            ``{"max_autotune": True}``.
        passes: a function that gets the list of passes (:func:`roundpipe_fx.default_passes`) and returns the one that
            is run on each graph: passes added, removed, replaced or in another order. ``None``: the list as it is.
        fullgraph: make a graph break an error, which names the user's line, instead of a warning.
        dynamic: as for ``torch.compile``.
        optim_dtype: the optimizer works on copies of the parameters in this dtype (``torch.float32`` for a model in
            bfloat16): see :meth:`CompiledModule.optim_parameters` and :meth:`CompiledModule.step`. ``None``: on the
            parameters themselves.
        devices: run pipelined, one worker on each; a device may be named several times (``["cpu", "cpu"]`` are two
            workers that divide the cores). The model stays where it is. On a GPU: stages on other devices get copies
            of their parameters for each step. On the CPU, with GPUs here: stages get copies of what they read while
            they run, gradients are copied back, and inputs and outputs are moved; a budget counts all of that.
        mesh: run pipelined over the processes of a ``DeviceMesh``, along its dimension ``"pp"``: one rank is one device
            of the schedule, and has the parameters of its own stages only. Every rank must be given the same model,
            options and batches. Along a dimension ``"dp"`` there are replicas of the pipeline, each with its own
            batches, which average gradients. See docs/many-processes.md.
        shard: ``"dp"``: parameters, gradients and the optimizer's state are sharded across the replicas along
            ``mesh``'s dimension of that name, as ``DTensor`` objects (ZeRO-3). A stage's parameters are gathered while
            it runs. ``None``: each replica has all of them.
        num_microbatches: into how many microbatches a batch is split; twice the number of devices by default.
        schedule: ``"gpipe"``, ``"1f1b"`` (the default), ``"interleaved"``, ``"zero_bubble"``, ``"zbv"``,
            ``"dualpipev"``, ``"roundpipe"`` (the default if the model is on the CPU and the devices are GPUs), another
            name in ``roundpipe_fx.schedules.SCHEDULES``, ``"auto"`` (the one whose simulated step is shortest within
            the budget), or a :class:`roundpipe_fx.Schedule`.
        checkpoint: which microbatches are recomputed when pipelined: ``"always"`` all, ``"except_last"`` all but the
            last, ``"never"`` none. ``None``: as ``recompute`` and ``memory_budget`` say; the budget then applies per
            device.
        split_input: how inputs are split into microbatches: ``None`` (tensors that have the batch's size, which is the
            first input's, along dimension 0, also in dicts, dataclasses and named tuples; lists by their items if there
            is one for each sample; numbers and objects without tensors are the same for each), (specs of args, specs
            of kwargs) as of ``torch.distributed.pipelining``, or a callable ``(args, kwargs, count) -> (list of args,
            list of kwargs)``.
        split_label: the same for labels: a spec or a callable ``(labels, count) -> list``.
        merge_output: how outputs are put together: ``None`` (tensors are concatenated along dimension 0, losses
            combined as ``loss_reduction`` says, and what is equal in all microbatches is returned once), specs, or a
            callable that gets the list.
        loss_reduction: how the microbatches' losses, and other outputs of one floating-point number, become the
            batch's: ``"mean"`` weighs them by rows, so that loss and gradients are those of the step without
            microbatches for a loss that is a mean over rows; ``"sum"`` is for losses that are sums, and for rows that
            count differently. Where the model reads ``num_items_in_batch``, as Hugging Face's Trainer passes it, its
            losses are parts of one mean, and added in any case.
        deferred_batch_norm: update the running statistics of batch norm once per step, from all microbatches, instead
            of once per microbatch.
        host_budget: for a model on the CPU and devices that are GPUs, the most bytes of pinned host memory that its
            weights, their gradients and the values that leave the devices may take, as bytes or a size like
            ``"64GiB"``. ``None``: 80 % of what the host has available, and the weights. For a model on GPUs: of values
            that leave where that makes a step within a budget shorter; ``None``: 80 % of what is available, and 0: none
            leave unless a selective policy says so. With a mesh, of each process, which must plan alike: ``None`` is 0.
        host_links: for such a model, how many links to the host the devices share evenly: GPUs behind one PCIe switch
            share one. Steps are planned as if all devices copied all the time. ``None``: each device has its own.

    Returns:
        the compiled model: an instance of a subclass of the model's class.

    Raises:
        TypeError: ``model`` is not a module, or an option has a wrong type.
        ValueError: an option has an unknown value, or ``passes`` returns a list that cannot be run. The first call
            raises :class:`InfeasibleBudgetError` (a ``ValueError``) where the budget cannot be met, and
            :class:`HostMemoryError` where ``host_budget`` cannot, before anything runs.
    """
    _check(model)
    _check_inside(model)
    options = Options.parse(
        {
            "stages": stages,
            "recompute": recompute,
            "memory_budget": memory_budget,
            "tiling": tiling,
            "outputs": outputs,
            "host_budget": host_budget,
            "cost": cost,
            "stage_compiler": stage_compiler,
            "inductor_options": inductor_options,
            "passes": passes,
        }
    )
    edit_passes(options.passes)  # an invalid list raises now, not at the first call
    check_shard(mesh, shard)
    if mesh is not None:
        devices = devices_of(
            mesh,
            model,
            options,
            devices=devices,
            optim_dtype=optim_dtype,
            deferred_batch_norm=deferred_batch_norm,
            host_links=host_links,
            checkpoint=checkpoint,
        )
    pipelining = parse_pipelining(
        options,
        devices=devices,
        num_microbatches=num_microbatches,
        schedule=schedule,
        checkpoint=checkpoint,
        loss_reduction=loss_reduction,
        host_links=host_links,
        over_processes=mesh is not None,
    )
    if mesh is not None and pipelining is not None:
        pipelining = set_mesh(pipelining, mesh, model, shard)
    splitting_options = {
        "splitting": Splitting(split_input, split_label, merge_output),
        "deferred_batch_norm": deferred_batch_norm,
    }
    if pipelining is None:
        if splitting_options != {"splitting": Splitting(), "deferred_batch_norm": False} or loss_reduction != "mean":
            raise ValueError(
                "split_input, split_label, merge_output, loss_reduction and deferred_batch_norm require microbatches: "
                "give num_microbatches or devices too."
            )
        splitting_options = {}
    return compiled_module(
        model,
        options,
        fullgraph=fullgraph,
        dynamic=dynamic,
        optim_dtype=optim_dtype,
        pipelining=pipelining,
        mesh=mesh,
        **splitting_options,
    )


def _check(model: Any) -> None:
    """Raise if a model cannot be compiled, or is compiled already."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"roundpipe_fx.compile takes an nn.Module, not {type(model).__name__}; "
            'for a function use torch.compile(fn, backend="roundpipe_fx").'
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "roundpipe_fx.compile takes no ScriptModule: code that torch.jit has compiled cannot be traced. "
            "Compile the model that it was made from."
        )
    offloaded = [name or "the model" for name, module in model.named_modules() if _is_offloaded(module)]
    if offloaded:
        raise TypeError(
            f"roundpipe_fx.compile takes no model whose weights accelerate's hooks bring in for each forward, as those "
            f"of {offloaded[0]!r}: they get no gradients, and the hooks cannot be traced. Load the model without "
            "device_map= and cpu_offload, or remove the hooks: accelerate.hooks.remove_hook_from_submodules(model). "
            "devices=['cuda:0'] keeps the weights of a model that is on the CPU there, and trains them."
        )
    if isinstance(model, CompiledModule):
        raise TypeError(COMPILED.format("roundpipe_fx.compile"))
    if isinstance(model, torch_private.OptimizedModule) or model._compiled_call_impl is not None:
        raise TypeError(COMPILED.format("torch.compile"))


def _is_offloaded(module: nn.Module) -> bool:
    """Test for a hook of accelerate's that moves a module's weights, which are elsewhere between its forwards."""
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(candidate, "offload", False) for candidate in (hook, *getattr(hook, "hooks", ())))


def _check_inside(model: nn.Module) -> None:
    """Raise if a part of a model is compiled already, with options that would be dropped.

    Raises:
        TypeError: it is.
    """
    for name, module in model.named_modules():
        if module is model:
            continue
        if isinstance(module, CompiledModule):
            dropped = module._state_of_roundpipe_fx.own_options
            by = "roundpipe_fx.compile"
        else:
            dropped = isinstance(module, torch_private.OptimizedModule) or module._compiled_call_impl is not None
            by = "torch.compile"
        if dropped:
            raise TypeError(
                f"{name!r}, a part of the model, is compiled already, by {by}, and its options would be dropped: the "
                "whole model is compiled as one. Compile the model with all options and leave its parts as they are, "
                "or compile only the parts."
            )
