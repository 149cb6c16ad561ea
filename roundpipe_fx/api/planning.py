"""Planning without a device: whether and how a model would fit one."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.api.compiled_module import compiled_module
from roundpipe_fx.budget import InfeasibleBudgetError, bytes_text
from roundpipe_fx.distributed.tensor_parallel import (
    check_tensor_parallel,
    local_tensor,
    replace_local_tensors,
    tensor_parallel_ranks,
)
from roundpipe_fx.ir.decisions import ModelMemory
from roundpipe_fx.ir.options import Options, suggest_name
from roundpipe_fx.pipeline.batches.microbatch import row_counts, split_inputs
from roundpipe_fx.pipeline.settings import Undivided, parse_pipelining
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.runtime.optimizer_memory import NO_OPTIMIZER, OptimizerMemory, optimizer_memory
from roundpipe_fx.schedules import Schedule
from roundpipe_fx.torch_private import fakes_on, tree_leaves, tree_map, tree_map_only

_SHARE = 0.9


def plan(
    model: nn.Module,
    *args: Any,
    memory_budget: int | float | str | None = None,
    device: str | None = None,
    devices: int = 1,
    mesh_shape: tuple[int, int] | tuple[int, int, int] | int | None = None,
    shard: str | None = None,
    network: Network | None = None,
    stages: int | str | list[str] | tuple[str, ...] = "auto",
    tiling: str | None = None,
    outputs: str = "auto",
    offloaded: bool = False,
    num_microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    host_budget: int | str | None = None,
    host_links: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **kwargs: Any,
) -> Plan:
    """Plan a training step for a device without running it and without allocating its memory.

    ::

        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).bfloat16()
        tokens = torch.empty(1, 4096, dtype=torch.long, device="meta")
        print(roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, device="H200"))

    The model may be on any device, including the meta device; its parameters are replaced by ones without storage.
    Stages are planned as run eagerly, with the operations that PyTorch chooses on the CPU: where a GPU has a fused
    kernel that the CPU has not (attention with dropout), a plan may ask for more than that device needs. What
    kernels allocate for themselves is measured when a model is compiled on its device; a plan from here has that of
    attention, norms, softmaxes, sorts, gradients of embeddings and reductions, which formulas give.

    With several devices the step is pipelined as with ``roundpipe_fx.compile(model, mesh=...)``: each device is a
    process, which has the parameters of its own stages.

    With ``mesh_shape`` there are replicas of such a pipeline, on machines of any number. Replicas are alike, so one of
    them is planned, with what it gathers from the others and reduces with them, and with the links of a network:
    ``plan(model, input_ids=tokens, labels=tokens, mesh_shape=(64, 16), device="H100")`` plans for 1,024 devices. Inputs
    are then the batch of one replica.

    A number as ``mesh_shape`` divides so many devices into replicas of a pipeline, with shared out parameters or
    without, such that the modelled step is the shortest that fits; with ``schedule="auto"`` the schedule is chosen too.
    Inputs are then the batch of all replicas: ``plan(model, input_ids=all_tokens, labels=all_tokens, mesh_shape=1024,
    schedule="auto", device="H100")``. All divisions run the same microbatches. ``plan.pipeline.mesh.divisions`` are
    those that were considered.

    Layers that several devices share out (tensor parallelism) are those of a model that was parallelized in PyTorch's
    own way. The plan is that of this process's rank, whose collectives take their time on the links between the ranks;
    no other process is needed::

        torch.distributed.init_process_group("fake", rank=0, world_size=8)
        parallelize_module(model, init_device_mesh("cpu", (8,)), {"layers.*.up": ColwiseParallel(), ...})
        print(roundpipe_fx.plan(model, input_ids=tokens, labels=tokens, mesh_shape=(8, 4, 8), device="H100"))

    Args:
        model: any module that ``torch.compile`` can trace as one graph.
        *args: its inputs; only shapes and dtypes of tensors matter.
        memory_budget: as for :func:`roundpipe_fx.compile`. ``None``: 90 % of the device's memory less the model's
            parameters and buffers, and the memory of ``optimizer``, unless it is offloaded; with several devices less
            those of its own stages, on the device that has most of them. No limit for ``"cpu"``.
        device: name of a device with a roofline (``"RTX 4090"``, ``"H100"``, ``"cpu"``, …); ``None``: this machine's
            GPU if its name is among them, else the CPU.
        devices: how many such devices the step is pipelined over.
        mesh_shape: sizes of the mesh's dimensions ``"dp"`` and ``"pp"``: how many replicas there are, and how many
            devices each of them has. Instead of ``devices``. Memory beside the budget is then for the optimizer's state
            too, if ``optimizer`` is given. A third size is that of ``"tp"``, the ranks on which the model's DTensors
            are: each device of a pipeline then stands for so many neighbours. A number: of all devices, however they
            are divided.
        shard: ``"dp"``: parameters, gradients and the optimizer's state are sharded across replicas, as for
            :func:`roundpipe_fx.compile`. Of a number of devices, ``None`` leaves that to be chosen.
        network: the links of the mesh; ``None``: the usual ones of such devices, eight of them on a node.
        stages: as for :func:`roundpipe_fx.compile`. ``"auto"`` with a number as ``mesh_shape``: one, two, four, … on
            each device, whichever takes the shortest step.
        tiling: as for :func:`roundpipe_fx.compile`.
        outputs: as for :func:`roundpipe_fx.compile`, of a plan for one device.
        offloaded: whether the model stays on the CPU, while the device holds what the current stage reads, as with
            ``roundpipe_fx.compile(model, devices=["cuda:0"])``; all devices are then of one process.
        num_microbatches: as for :func:`roundpipe_fx.compile`; by default twice the number of devices if there are
            several or the model is offloaded. With a number as ``mesh_shape``: of all replicas together, by default one
            for each row; rows must be divisible by it.
        schedule: as for :func:`roundpipe_fx.compile`.
        host_budget: as for :func:`roundpipe_fx.compile`; ``None``: 128 GiB, and a plan that uses them says so. With
            several devices that are not offloaded, which are processes, nothing leaves.
        host_links: as for :func:`roundpipe_fx.compile`; only if the model is offloaded.
        optimizer: one whose memory is counted, made from the model's parameters or from copies of them, which are
            counted too: on the host if the model is offloaded, else on the device, or those of the mesh. (Several
            devices without ``mesh_shape`` do not count it.) Like them it needs no memory here:
            ``torch.optim.AdamW(model.parameters())`` of a model on the meta device.
        **kwargs: more inputs.

    Returns:
        the plan, which fits at the cost of ``recompute_seconds``, including the emitted code.

    Raises:
        InfeasibleBudgetError: it does not fit; the message says which limit is exceeded and how many bytes are needed.
        HostMemoryError: the host would need more than ``host_budget``.
        ValueError: a device of unknown name; the message lists the known ones. Or an option has an unknown value, or
            devices cannot be divided.
        TypeError: an option has a wrong type, or a keyword is neither an option nor an input of the model.
    """
    _check_names(model, kwargs)
    name = device_name(device)
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise ValueError(f"devices={devices!r}: plan() takes a number of devices, at least 1, all of the same kind.")
    options = Options.parse(
        {
            "stages": stages,
            "memory_budget": memory_budget,
            "tiling": tiling,
            "outputs": outputs,
            "host_budget": host_budget,
            "stage_compiler": "eager",
        }
    )
    budget = options.memory_budget
    replicas, ranks = 1, tensor_parallel_ranks(model)
    given_ranks = None
    searches_shape = isinstance(mesh_shape, int) and not isinstance(mesh_shape, bool)
    if searches_shape:
        replicas = _mesh_devices(mesh_shape, ranks, devices, offloaded, options, schedule)
    elif mesh_shape is not None:
        replicas, devices, given_ranks = _mesh_sizes(mesh_shape, devices, offloaded)
    elif shard is not None or network is not None:
        raise ValueError("shard= and network= are of a mesh: give mesh_shape=(replicas, devices of each) too.")
    if shard not in (None, "dp"):
        raise ValueError(f"shard={shard!r}: the only valid value is 'dp'.")
    if network is not None and not isinstance(network, Network):
        raise TypeError(f"network={network!r}: give a roundpipe_fx.Network, or leave it out for the usual one.")
    if host_links is not None and not offloaded:
        raise ValueError("host_links= is for a model on the CPU: give offloaded=True too.")
    alone = "offloaded=True" if offloaded else f"devices={devices}" if devices > 1 and mesh_shape is None else ""
    check_tensor_parallel(ranks, mesh_shape, given_ranks, alone)
    over_processes = mesh_shape is not None or (devices > 1 and not offloaded)
    memory = NO_OPTIMIZER
    if optimizer is not None:
        memory = optimizer_memory(optimizer, {id(parameter) for parameter in model.parameters()})
    # Bytes of this rank's shards, if the model is parallelized.
    tensors = map(local_tensor, (*model.parameters(), *model.buffers()))
    weights = 0 if offloaded else sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    state = 0 if offloaded or over_processes else memory.bytes
    if budget is None:
        # Without a budget: what the device has, less a margin, less what lies there between steps.
        total = int(_SHARE * (DEVICES[name].memory or 0))
        if total:
            _check_weights(weights, state, total, devices * (replicas if shard or searches_shape else 1), name)
        budget = (total if over_processes else total - weights - state) if total else 1.0
    options = dataclasses.replace(options, memory_budget=budget, device_name=name)
    # Not on the meta device: there operations like ``nll_loss`` have a kernel and no gradient, and the backward of the
    # loss would be missing in the graph.
    stand_ins = _make_stand_ins(model, (args, kwargs), replace_local_tensors(fakes_on("cpu")))
    args, kwargs = tree_map(lambda value: stand_ins.get(id(value), value), (args, kwargs))
    undivided = None
    tokens = _count_tokens((args, kwargs))
    # Devices that are to be divided plan one microbatch: its size is the same in every division.
    if searches_shape:
        undivided, (args, kwargs) = _take_microbatch((args, kwargs), replicas, ranks, num_microbatches)
        replicas = num_microbatches = 1
    # For exactly these sizes, whatever was planned or compiled before.
    pipelining = None
    if offloaded or over_processes or num_microbatches is not None or schedule is not None:
        parsed = parse_pipelining(
            options,
            devices=["cpu"] * devices if over_processes or (offloaded and devices > 1) else None,
            num_microbatches=2 * devices if num_microbatches is None else num_microbatches,
            schedule=schedule,
            host_links=host_links,
            over_processes=over_processes,
        )
        assert parsed is not None
        pipelining = dataclasses.replace(
            parsed,
            # Offloaded, devices are of one process: those beside the first get copies of inputs, as others there do.
            devices=tuple(
                torch.device("cpu", number) if number and offloaded else worker
                for number, worker in enumerate(parsed.devices)
            ),
            offloaded=offloaded,
            optimizer=memory,
            elsewhere=True,
            replicas=replicas,
            sharded=shard is not None and (replicas > 1 or searches_shape),
            network=(network or DEVICES[name].network) if mesh_shape is not None else None,
            tensor_parallel=ranks,
            optimizer_share=_optimizer_share(memory, model) if mesh_shape is not None else 0.0,
            budget_has_weights=over_processes and memory_budget is None and isinstance(budget, int),
            undivided=undivided,
        )
    # The user's model stays as it is; the copy has parameters without memory.
    model = copy.deepcopy(model, stand_ins)
    planned = compiled_module(model, options, fullgraph=True, dynamic=False, pipelining=pipelining)
    step_plan = planned.trace(*args, **kwargs)
    if step_plan.pipeline is None:
        optimizer_name = type(optimizer).__name__ if optimizer is not None else ""
        device_bytes = DEVICES[name].memory or 0
        held = ModelMemory(parameters=weights, optimizer=state, optimizer_name=optimizer_name, device=device_bytes)
        return dataclasses.replace(step_plan, model=held)
    if step_plan.pipeline.mesh is None:
        return step_plan
    # Tokens were counted for the whole batch; the plan speaks of one replica.
    if undivided is not None:
        tokens //= step_plan.pipeline.mesh.replicas
    mesh = dataclasses.replace(step_plan.pipeline.mesh, tokens=tokens)
    return dataclasses.replace(step_plan, pipeline=dataclasses.replace(step_plan.pipeline, mesh=mesh))


def _mesh_sizes(mesh_shape: Any, devices: int, offloaded: bool) -> tuple[int, int, int]:
    """Split a mesh shape into the numbers of replicas, of devices per replica, and of tensor-parallel ranks.

    Raises:
        ValueError: they are not two or three positive numbers, or contradict other options.
    """
    sizes = tuple(mesh_shape) if isinstance(mesh_shape, (tuple, list)) else ()
    if len(sizes) not in (2, 3) or any(
        isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes
    ):
        raise ValueError(
            f"mesh_shape={mesh_shape!r}: give the sizes of the dimensions 'dp' and 'pp', as mesh_shape=(64, 16): 64 "
            "replicas of 16 devices each. A third size is that of 'tp', over which the model is parallelized. Or give "
            "a number of devices, as mesh_shape=1024, which are then divided."
        )
    _check_mesh_alone(mesh_shape, devices, offloaded)
    return sizes[0], sizes[1], sizes[2] if len(sizes) == 3 else 1


def _check_mesh_alone(mesh_shape: Any, devices: int, offloaded: bool) -> None:
    """Refuse other options about devices beside a mesh.

    Raises:
        ValueError: there are some.
    """
    if devices != 1 or offloaded:
        other = "offloaded=True" if offloaded else f"devices={devices}"
        raise ValueError(f"mesh_shape={mesh_shape!r} and {other} exclude each other: the mesh has all devices.")


def _mesh_devices(
    mesh_shape: Any, ranks: int, devices: int, offloaded: bool, options: Options, schedule: str | Schedule | None
) -> int:
    """The number of devices of a mesh without a shape, or of its groups of tensor-parallel ranks.

    Raises:
        ValueError: it is not positive, or contradicts other options.
    """
    if mesh_shape < 1:
        raise ValueError(f"mesh_shape={mesh_shape}: a mesh has at least one device.")
    if mesh_shape % ranks:
        raise ValueError(
            f"mesh_shape={mesh_shape}: the model's parameters are DTensors over {ranks} devices, and {mesh_shape} are "
            f"no whole number of such groups. Give a multiple of {ranks}."
        )
    _check_mesh_alone(mesh_shape, devices, offloaded)
    if isinstance(options.stages, tuple):
        raise ValueError(
            f"mesh_shape={mesh_shape} and stages with names exclude each other: how many stages there can be depends "
            "on how devices are divided. Give a number, or leave stages='auto'."
        )
    if isinstance(schedule, Schedule):
        raise ValueError(
            f"mesh_shape={mesh_shape} and a Schedule exclude each other: it is for one number of devices and "
            "microbatches. Give its mesh_shape=(replicas, devices of each), or the name of a schedule."
        )
    if isinstance(options.memory_budget, float):
        raise ValueError(
            f"memory_budget={options.memory_budget} with mesh_shape={mesh_shape}: a share means other bytes for each "
            "way to divide devices, so they could not be compared. Give bytes, such as '60GiB'."
        )
    if options.host_budget:
        raise ValueError(
            f"mesh_shape={mesh_shape} and host_budget= exclude each other: how short a step can be is not bounded for "
            "all ways to divide devices where values leave for the host. Give a shape, mesh_shape=(replicas, devices "
            "of each)."
        )
    return int(mesh_shape) // ranks


def _take_microbatch(inputs: Any, devices: int, ranks: int, num_microbatches: int | None) -> tuple[Undivided, Any]:
    """The microbatches of a batch of all replicas, and the first one's inputs.

    Args:
        inputs: positional and keyword inputs.
        devices: how many there are, or groups of them.
        ranks: how many devices a group has.

    Raises:
        ValueError: rows cannot be divided equally.
        TypeError: the number of microbatches is none.
    """
    args, kwargs = inputs
    rows = row_counts(args, kwargs, split_inputs(args, kwargs, 1))[0]
    count = rows if num_microbatches is None else num_microbatches
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"num_microbatches must be a positive int, not {count!r}.")
    if count < 1:
        raise ValueError(f"num_microbatches={count}: there must be at least one.")
    if rows % count:
        raise ValueError(
            f"num_microbatches={count}: the batch of all replicas has {rows} rows, which are not divisible by it, and "
            "all divisions of the devices are to run equal microbatches. Give a divisor of the rows."
        )
    # A part of a batch would be priced with the storage of all of it.
    microbatch = tree_map_only(torch.Tensor, _copy_storage, split_inputs(args, kwargs, count)[0])
    return Undivided(devices, count, ranks), microbatch


def _copy_storage(value: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into a storage of its own."""
    return value.detach().clone().requires_grad_(value.requires_grad)


def _optimizer_share(memory: OptimizerMemory, model: nn.Module) -> float:
    """Bytes of the optimizer's state for each byte of a parameter that gets a gradient."""
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return memory.bytes / trained if trained else 0.0


def _count_tokens(inputs: Any) -> int:
    """Number of tokens of a batch: of the first integers that it has in rows; 0: it has none."""
    tensors = (value for value in tree_leaves(inputs) if isinstance(value, torch.Tensor))
    return next((value.numel() for value in tensors if value.dim() == 2 and value.dtype == torch.long), 0)


_OPTIONS = (
    "memory_budget",
    "device",
    "devices",
    "mesh_shape",
    "shard",
    "network",
    "stages",
    "tiling",
    "outputs",
    "offloaded",
    "num_microbatches",
    "schedule",
    "host_budget",
    "host_links",
    "optimizer",
)


def _check_names(model: nn.Module, inputs: Collection[str]) -> None:
    """Look for misspelt options among the names of the model's inputs."""
    accepted = inspect.signature(model.forward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in inputs:
        hint = suggest_name(name, _OPTIONS, cutoff=0.8)
        if name in accepted or (takes_all and not hint):
            continue
        if takes_all:
            warnings.warn(f"roundpipe_fx: plan() gives {name!r} to the model as an input.{hint}", stacklevel=3)
        else:
            raise TypeError(
                f"plan() got an unexpected keyword argument {name!r}: neither it nor the model's forward knows "
                f"it.{hint}"
            )


def _check_weights(weights: int, state: int, total: int, devices: int, name: str) -> None:
    """Refuse weights that fill the devices, however they are divided.

    Args:
        weights: bytes of the parameters and buffers on devices.
        state: bytes of the optimizer's state there.
        total: bytes of a device that may be used.
        devices: how many there are.

    Raises:
        InfeasibleBudgetError: they do.
    """
    if weights + state < total * devices:
        return
    description = f"{devices} times {name}" if devices > 1 else name
    optimizer = f", the optimizer's state {bytes_text(state)}" if state else ""
    raise InfeasibleBudgetError(
        f"the model's parameters and buffers alone take {bytes_text(weights)}{optimizer}, and {_SHARE:.0%} of "
        f"{description}'s memory is {bytes_text(total * devices)}. A model that stays on the CPU has the current stage "
        "there, not all of it: offloaded=True here, compile(model, devices=['cuda:0']) there. Or use more devices.",
        weights + state,
    )


def device_name(device: str | None) -> str:
    """The name of the device to plan for: the one given, or this machine's.

    Raises:
        ValueError: it is unknown.
    """
    if device is None:
        reported = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        return next((name for name in DEVICES if name != "cpu" and name in reported), "cpu")
    if device not in DEVICES:
        listed = ", ".join(DEVICES)
        raise ValueError(f"no roofline for a device named {device!r}.{suggest_name(device, DEVICES)} Known: {listed}.")
    return device


def _make_stand_ins(model: nn.Module, inputs: Any, fake: Callable[[torch.Tensor], torch.Tensor]) -> dict[int, Any]:
    """By ``id``, a tensor without memory for each tensor of a model and its inputs."""
    stand_ins: dict[int, Any] = {}
    for parameter in model.parameters():
        stand_ins[id(parameter)] = nn.Parameter(fake(parameter), parameter.requires_grad)
    for value in tree_leaves([inputs, *(list(vars(module).values()) for module in model.modules())]):
        if isinstance(value, torch.Tensor) and id(value) not in stand_ins:
            stand_ins[id(value)] = fake(value)
    return stand_ins
