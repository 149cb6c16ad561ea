"""The user's options for pipelining, checked before anything is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.ir.options import Options
from roundpipe_fx.pipeline.same_segments import OperationKey
from roundpipe_fx.runtime.optimizer_memory import NO_OPTIMIZER, OptimizerMemory
from roundpipe_fx.schedules import SCHEDULES, Schedule, ScheduleSpec
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition
from roundpipe_fx.schedules.spec import make_custom_spec

CHECKPOINTS = ("always", "except_last", "never")
LOSS_REDUCTIONS = ("mean", "sum")
COUNT_OF_BATCH = "num_items_in_batch"
"""The input by which Hugging Face's models divide the sum of their rows' losses; the Trainer counts it."""


@dataclass(frozen=True)
class Structure:
    """The cuts of a graph: microbatches of another shape in the same step are cut alike.

    Attributes:
        segments: how many there were.
        cut: RoundPipe's slots, or the first segment of each stage.
        starts: the first operation of each segment but the first.
    """

    schedule: ScheduleSpec
    segments: int
    cut: RoundPipePartition | tuple[int, ...]
    starts: tuple[OperationKey | None, ...]

    @property
    def name(self) -> str:
        """Name of the schedule."""
        return self.schedule.name


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """Facts of a step that its compilations know.

    Attributes:
        structure: how its first graph was cut, or how all are; ``None``: nothing says it yet.
        forwards_before_backwards: whether all forwards run before all backwards, with a loss outside between them.
        offloaded: whether the model lies on the host, and devices have of it what they need at the time.
        counted: whether the model is given the number of what counts in the batch.
        sizes_differ: whether the step's microbatches have different sizes.
    """

    structure: Structure | None = None
    forwards_before_backwards: bool = False
    offloaded: bool = False
    counted: bool = False
    sizes_differ: bool = False


@dataclass(kw_only=True)
class StepCompileState:
    """Facts that steps tell the compilations of their graphs.

    Attributes:
        step: the one that captures its microbatches now.
        optimizer: host memory of the optimizer, if it is known.
        kept: how graphs are cut since microbatches of one step were cut differently, by whether gradients are computed.
    """

    step: StepSetting = StepSetting()
    optimizer: OptimizerMemory = NO_OPTIMIZER
    kept: dict[bool, Structure] = field(default_factory=dict)


@dataclass(frozen=True)
class Undivided:
    """Devices that are yet to be divided into replicas of a pipeline (:mod:`roundpipe_fx.planner.divide_devices`).

    Attributes:
        devices: how many, or groups of those that run each stage together.
        microbatches: of all replicas together.
        group: how many devices a group has.
    """

    devices: int
    microbatches: int
    group: int = 1

    @property
    def total(self) -> int:
        """Number of devices in all."""
        return self.devices * self.group

    @property
    def text(self) -> str:
        """The devices that are divided, in words."""
        return f"{self.devices} devices" if self.group == 1 else f"{self.devices} groups of {self.group} devices"


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """The pipeline of a step.

    Attributes:
        devices: one worker each; a device may be named several times. Empty: one worker, where the model is.
        microbatches: into how many a batch is split.
        schedule: one that is known by name, or the user's own; ``"auto"``: the quickest; ``None``: the usual one
            (:func:`roundpipe_fx.schedules.registry.default_schedule`).
        checkpoint: which microbatches are recomputed: ``"always"`` all, ``"except_last"`` all but the last,
            ``"never"`` none; ``None``: as a byte budget requires, without one none.
        offloaded: whether the model is on the host, and devices hold what they currently need of it. If it is not
            given, it is determined when a step is traced.
        loss_reduction: how the microbatches' losses become the batch's: ``"mean"``, weighed by rows, or ``"sum"``.
        over_processes: whether each device is a process with the parameters of its own stages.
        replicas: how many such pipelines there are, with batches of their own.
        sharded: whether parameters are sharded across replicas.
        host_budget: bytes that a step may take on the host, in each process; ``None``: a share of what is available
            there, or the memory of an assumed host if the step is planned for elsewhere.
        host_links: how many links to the host the devices share evenly; ``None``: each has one.
        optimizer: host memory of the optimizer, if it is known.
        elsewhere: whether the step is planned for a machine that is not this one.
        budget_has_weights: whether a budget in bytes is also for the parameters and buffers of a device's own stages,
            and for the optimizer's state of these parameters.
        network: the links between the devices of all replicas; ``None``: they are not modelled.
        tensor_parallel: how many neighbouring devices run each stage together, as its collectives say. One of them is
            planned, in place of all: a worker is such a group.
        optimizer_share: bytes of the optimizer's state for each byte of a parameter, where replicas are planned for.
        undivided: the devices of a mesh of no fixed shape: ``devices``, ``microbatches``, ``replicas`` and ``sharded``
            are then chosen, ``sharded`` unless it is true; ``None``: they are fixed.
    """

    devices: tuple[torch.device, ...]
    microbatches: int
    schedule: ScheduleSpec | Literal["auto"] | None
    checkpoint: str | None
    offloaded: bool = False
    loss_reduction: str = "mean"
    over_processes: bool = False
    replicas: int = 1
    sharded: bool = False
    host_budget: int | None = None
    host_links: int | None = None
    optimizer: OptimizerMemory = NO_OPTIMIZER
    elsewhere: bool = False
    budget_has_weights: bool = False
    network: Network | None = None
    tensor_parallel: int = 1
    optimizer_share: float = 0.0
    undivided: Undivided | None = None

    @property
    def between(self) -> Network | None:
        """The links between workers; ``None``: they are not modelled."""
        return None if self.network is None else self.network.between_groups(self.tensor_parallel)

    @property
    def sends_unasked(self) -> bool:
        """Permission to offload values without a request. Processes need equal plans, and their free host memory may
        differ."""
        return (self.host_budget is None and not self.over_processes) or bool(self.host_budget)

    @property
    def workers(self) -> int:
        """Number of workers: one, on the model's own device, where no devices were given."""
        return max(1, len(self.devices))

    def host_bandwidth(self, of_a_link: float) -> float:
        """Bytes per second between a device and the host while all devices copy.

        Args:
            of_a_link: of one link, in each direction.
        """
        # Links are shared evenly, and the slowest decides: 8 devices at 3 links have at most 3 at one, so a third of it
        # each.
        sharing = 1 if self.host_links is None else -(-self.workers // self.host_links)
        return of_a_link / sharing


def parse_pipelining(
    options: Options,
    *,
    devices: Sequence[torch.device | str] | None = None,
    num_microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    checkpoint: str | None = None,
    loss_reduction: str = "mean",
    host_links: int | None = None,
    over_processes: bool = False,
) -> Pipelining | None:
    """Check the user's options; ``None`` if none of them asks for pipelining.

    Args:
        over_processes: whether each device is a process.

    Raises:
        ValueError: a device that does not exist, fewer stages than devices, an unknown name, or options that contradict
            each other.
        TypeError: a value of a wrong type.
    """
    stages, recompute = options.stages, options.recompute
    if loss_reduction not in LOSS_REDUCTIONS:
        names = ", ".join(repr(name) for name in LOSS_REDUCTIONS)
        raise ValueError(f"loss_reduction={loss_reduction!r}: valid values are {names}.")
    # None of the arguments that ask for a pipeline is given: the step runs on one device, and needs no split.
    if devices is None and num_microbatches is None and schedule is None and checkpoint is None:
        if host_links is not None:
            raise ValueError("host_links is for a model on the CPU that devices train: give devices=['cuda:0'] too.")
        return None
    if options.outputs == "dropped" or (options.outputs == "unread" and over_processes):
        instead = "" if over_processes else "Give outputs='unread' if nothing reads them. "
        raise ValueError(
            f"outputs={options.outputs!r} is for one device: those of microbatches are put together, and of processes "
            f"exchanged, before they can be dropped. {instead}forward_backward() without return_outputs=True makes "
            "none beside the loss."
        )
    if isinstance(devices, (str, torch.device)):
        raise TypeError(f"devices={devices!r}: give a list, as devices=['cuda:0', 'cuda:1'].")
    parsed = tuple(_device(device) for device in devices) if devices is not None else ()
    if devices is not None and not parsed:
        raise ValueError("devices=[]: there must be at least one device.")
    if len({device.type for device in parsed}) > 1:
        raise ValueError(
            f"devices={list(map(str, parsed))}: all must be of one type, since the model is traced for it."
        )
    # GPipe's bubble is ``(p - 1) / (m + p - 1)`` of a step: about a half with m = p microbatches, a third with 2 p.
    if num_microbatches is None:
        num_microbatches = 2 * max(1, len(parsed))
    # ``True`` is an int in Python, and a batch in "True" parts is a mistake.
    if isinstance(num_microbatches, bool) or not isinstance(num_microbatches, int):
        raise TypeError(f"num_microbatches must be a positive int, not {num_microbatches!r}.")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches}: there must be at least one.")
    spec = _schedule_asked(schedule)
    if checkpoint is not None and checkpoint not in CHECKPOINTS:
        names = ", ".join(repr(name) for name in CHECKPOINTS)
        raise ValueError(f"checkpoint={checkpoint!r}: valid values are {names}.")
    # A budget decides for itself what is recomputed: two answers to one question could contradict each other.
    if checkpoint is not None and (recompute is not None or options.memory_budget is not None):
        raise ValueError(
            f"checkpoint={checkpoint!r} says what is recomputed, and so does "
            f"{'recompute' if recompute is not None else 'memory_budget'}. Give one of them."
        )
    if isinstance(spec, ScheduleSpec) and spec.dispatches and stages != "auto":
        raise ValueError(
            f"stages={stages!r}: the schedule {spec.name!r} cuts forward and backward itself, independently of each "
            "other. Leave stages='auto'."
        )
    count = stages if isinstance(stages, int) else len(stages) + 1 if isinstance(stages, tuple) else None
    if count is not None and count < len(parsed):
        raise ValueError(
            f"stages={stages!r} are fewer than the {len(parsed)} devices: a device without a stage would have nothing "
            "to do. Use as many stages as devices, or more."
        )
    # ``recompute`` is the name on one device, ``checkpoint`` that of pipelines: from here on there is one.
    if recompute is not None:
        checkpoint = {"full": "always", "none": "never"}[recompute]
    return Pipelining(
        devices=parsed,
        microbatches=num_microbatches,
        schedule=spec,
        checkpoint=checkpoint,
        loss_reduction=loss_reduction,
        host_budget=options.host_budget,
        host_links=_host_links(host_links),
        over_processes=over_processes,
    )


def _schedule_asked(schedule: str | Schedule | None) -> ScheduleSpec | Literal["auto"] | None:
    if schedule is None:
        return None
    if schedule == "auto":
        return "auto"
    if isinstance(schedule, Schedule):
        return make_custom_spec(schedule)
    if not isinstance(schedule, str):
        raise TypeError(f"schedule must be a name or a roundpipe_fx.Schedule, not {type(schedule).__name__}.")
    if schedule not in SCHEDULES:
        names = ", ".join(repr(name) for name in (*SCHEDULES, "auto"))
        raise ValueError(f"schedule={schedule!r}: valid values are {names}, or a roundpipe_fx.Schedule.")
    return SCHEDULES[schedule]


def _host_links(asked: Any) -> int | None:
    """The number of links to the host.

    Raises:
        TypeError: it is neither an ``int`` nor ``None``.
        ValueError: it is less than one.
    """
    if asked is None:
        return None
    if isinstance(asked, bool) or not isinstance(asked, int):
        raise TypeError(f"host_links must be a number of links, not {asked!r}.")
    if asked < 1:
        raise ValueError(f"host_links={asked}: there must be at least one link to the host.")
    return asked


def _device(asked: torch.device | str) -> torch.device:
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"devices: {asked!r} is not a device: {str(error).splitlines()[0]}") from None
    # All workers of the CPU share its memory and threads, so there is one CPU, whatever the number of workers.
    if device.type == "cpu":
        if device.index not in (None, 0):
            raise ValueError(f"devices: {asked!r} does not exist; the CPU is 'cpu', named once for each worker.")
        return torch.device("cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available():
            raise ValueError(f"devices: {asked!r} does not exist: this machine has no CUDA device.")
        if device.index is not None and device.index >= count:
            raise ValueError(f"devices: {asked!r} does not exist: this machine has cuda:0 to cuda:{count - 1}.")
        # "cuda" is the current device: it must be fixed here, since workers are threads that have current devices of
        # their own.
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    raise ValueError(f"devices: {asked!r} is not supported; devices are 'cpu' or 'cuda:<number>'.")
