"""The decisions of a plan as plain data: values, tiles, stages, what lies on the host, the pipeline, and the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundpipe_fx.budget import bytes_text

_REGIONS = 6
"""Number of tiled regions that are listed."""

LISTS = ("saved", "hoisted", "recomputed", "replayed", "passing")
"""Lists of values that a stage has; each value is in one of them, replayed ones in two."""


@dataclass(frozen=True, kw_only=True)
class PlannedValue:
    """One value of the graph.

    Attributes:
        name: the value's name in the emitted code.
        module: path of the user's module that computes it.
        type: dtype and shape.
        bytes: bytes of its storage; an upper bound if the size depends on data.
        reason: why it was hoisted, or must not be saved; empty otherwise.
        seconds: modelled seconds of computing it once.
        times: how often the backward recomputes it.
        recompute_seconds: modelled seconds of recomputing it, or that it would take if it were not saved, including
            everything that has to run for it.
        line: file and line of the user's program that computes it, as ``model.py:12``; empty if unknown.
    """

    name: str
    module: str
    type: str
    bytes: int
    reason: str = ""
    seconds: float = 0.0
    times: int = 0
    recompute_seconds: float = 0.0
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedTiles:
    """Operations that are carried out on one tile of rows after another.

    Attributes:
        name: the widest value inside, which never exists as a whole.
        module: path of the user's module that computes it.
        type: dtype and shape of the whole.
        bytes: bytes of the whole.
        seconds: modelled seconds of all tiles.
        line: file and line of the user's program that computes it, as ``model.py:12``; empty if unknown.
        loop: name of the loop over the tiles in the emitted code.
    """

    name: str
    module: str
    type: str
    bytes: int
    rows: int
    tiles: int
    seconds: float
    line: str = ""
    loop: str = ""


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage, and what happens to its values.

    Attributes:
        index: position in the pipeline.
        modules: the user's modules in it, first and last.
        segments: indices of its first and last segment.
        forward_seconds: modelled seconds of the forward.
        recompute_seconds: modelled seconds of recomputed operations, early or just in time.
        backward_seconds: modelled seconds of the backward, without recomputation.
        early_seconds: those seconds of both that are spent in the recompute module, before the stage's incoming
            gradients arrive.
        entry_bytes: bytes of computed values that are live across its beginning.
        saved: values saved from forward to backward, without hoisted ones and generator states.
        hoisted: values saved because their operation must not run twice.
        recomputed: values recomputed in the backward.
        replayed: random operations that are recomputed from a saved generator state.
        passing: values of the forward that the backward does not read.
        same_as: an earlier stage that does the same work on the same shapes, if there is one.
    """

    index: int
    modules: str
    segments: tuple[int, int]
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    early_seconds: float
    entry_bytes: int
    saved: tuple[PlannedValue, ...]
    hoisted: tuple[PlannedValue, ...]
    recomputed: tuple[PlannedValue, ...]
    replayed: tuple[PlannedValue, ...]
    passing: tuple[PlannedValue, ...] = ()
    same_as: int | None = None


@dataclass(frozen=True, kw_only=True)
class OffloadedValue:
    """A saved value that leaves its device for the host between two of its readers, in some microbatches or all.

    Attributes:
        name: name of the value.
        number: what the schedule's offloads call it.
        bytes: bytes of the value in one microbatch.
        microbatches: in how many microbatches of a step it leaves.
    """

    name: str
    number: int
    bytes: int
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class GatheredStage:
    """Sharded parameters of a stage on one device.

    Attributes:
        device: number of the device.
        bytes: of its parameters as a whole.
        gaps: how often in a step they are not needed for a while, and then again.
        kept: how often of these they stay gathered.
    """

    device: int
    stage: int
    bytes: int
    gaps: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class PlannedDivision:
    """A way to divide devices into replicas of a pipeline: the best of those with as many replicas, sharded or not.

    Attributes:
        pipeline: number of devices of a replica.
        replicas: how many there are.
        sharded: whether parameters, gradients and the optimizer's state are sharded across them.
        stages: into how many the model is cut.
        schedule: name of the schedule.
        seconds: modelled seconds of a step; of a division that was not planned, what it takes at the least; ``None``:
            it does not fit.
        bytes: of the fullest device, with weights and the optimizer's state; if it was not planned, at the least.
        fits: whether a step fits; true where it was not planned and may.
        planned: whether it was planned.
        chosen: whether it is the plan's.
    """

    pipeline: int
    replicas: int
    sharded: bool
    stages: int
    schedule: str
    seconds: float | None
    bytes: int
    fits: bool
    planned: bool
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class PlannedMesh:
    """Replicas of a pipeline on a mesh of devices, as planned.

    Attributes:
        replicas: how many pipelines there are, each with a batch of its own.
        sharded: whether parameters, gradients and the optimizer's state are sharded across them.
        weight_bytes: for each device of a pipeline, bytes of its parameters and buffers between steps.
        optimizer_bytes: for each device of a pipeline, bytes of the optimizer's state; 0 where it is not known.
        collective_seconds: modelled seconds that the device with most of them gathers and reduces.
        unhidden_seconds: how much shorter a step would be if no communication took time, that of the pipeline included,
            that of tensor parallelism not.
        tokens: in the batch of one replica; 0 where the inputs have none.
        tensor_parallel: how many neighbouring devices run each stage together. A device of the pipeline stands for all
            of them: its bytes are those of each.
        tensor_parallel_seconds: modelled seconds that the device with most of them spends in collectives with these,
            beside which nothing runs.
        divisions: the ways to divide the devices among which this one was chosen; empty: it was given.
    """

    replicas: int
    sharded: bool
    weight_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    collective_seconds: float
    unhidden_seconds: float
    tokens: int = 0
    tensor_parallel: int = 1
    tensor_parallel_seconds: float = 0.0
    divisions: tuple[PlannedDivision, ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class PlannedPipeline:
    """The pipeline of a step.

    Attributes:
        schedule: name of the schedule.
        devices: the device of each worker.
        microbatches: number of microbatches of a whole batch.
        checkpoint: which microbatches are recomputed; empty if a byte budget decides.
        makespan: modelled seconds of a step.
        bubble: modelled share of the devices' time that they spend waiting.
        peak_bytes: for each device, peak bytes beyond those allocated when the step began: values of the microbatches
            in flight, gradients, temporaries.
        order: the actions of every device with the transfers between them, one line per device.
        host_to_device_bytes: bytes that a step copies to the devices for an offloaded model; 0 for other models.
        loss_reduction: how the microbatches' losses are combined to the batch's loss.
        sent_bytes: bytes of values that leave the devices for the host in a step, and come back.
        sent_values: how many values these are, over all microbatches.
        host_weight_bytes: bytes of an offloaded model's weights on the host.
        host_gradient_bytes: bytes of their gradients on the host.
        host_value_bytes: bytes of the buffers on the host for values that leave the devices.
        host_optimizer_bytes: bytes on the host of the optimizer's state and of copies of parameters that it steps,
            where the optimizer is known.
        gathered_bytes: for each device, bytes of sharded parameters that it gathers in a step; empty: none are.
        gathered: which of them stay gathered.
        mesh: replicas of the pipeline, and the cost of communication; ``None``: it was not planned for a mesh.
    """

    schedule: str
    devices: tuple[str, ...]
    microbatches: int
    checkpoint: str
    makespan: float
    bubble: float
    peak_bytes: tuple[int, ...]
    order: str = field(repr=False)
    host_to_device_bytes: int = 0
    loss_reduction: str = "mean"
    sent_bytes: int = 0
    sent_values: int = 0
    offloaded: tuple[OffloadedValue, ...] = field(default=(), repr=False)
    host_weight_bytes: int = 0
    host_gradient_bytes: int = 0
    host_value_bytes: int = 0
    host_optimizer_bytes: int = 0
    gathered_bytes: tuple[int, ...] = ()
    gathered: tuple[GatheredStage, ...] = field(default=(), repr=False)
    mesh: PlannedMesh | None = None

    @property
    def device_bytes(self) -> tuple[int, ...]:
        """For each device, the bytes of its weights, optimizer state and a step; only where a mesh was planned."""
        mesh = self.mesh
        if mesh is None:
            return ()
        return tuple(map(sum, zip(mesh.weight_bytes, mesh.optimizer_bytes, self.peak_bytes, strict=True)))

    @property
    def tokens_per_second(self) -> float | None:
        """Modelled tokens a second of each device; ``None`` where no mesh was planned, or inputs have no tokens."""
        if self.mesh is None or not self.mesh.tokens:
            return None
        return self.mesh.tokens / (self.makespan * len(self.devices) * self.mesh.tensor_parallel)

    @property
    def host_bytes(self) -> int:
        """Bytes that a step needs on the host: values from the devices; for an offloaded model also weights, gradients,
        and what the optimizer has, where it is known."""
        return self.host_weight_bytes + self.host_gradient_bytes + self.host_value_bytes + self.host_optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class LiveValue:
    """A value that is alive at the peak.

    Attributes:
        name: name in the emitted code.
        module: path of the user's module that computed it.
        bytes: bytes of its storage.
        gradient: whether it is a gradient that the backward returns, of a parameter or an input.
        line: file and line of the user's program that computes a value outside of all modules, as ``loss.py:12``.
        saved: whether the forward has saved it for the backward.
    """

    name: str
    module: str
    bytes: int
    gradient: bool = False
    line: str = ""
    saved: bool = False


@dataclass(frozen=True, kw_only=True)
class PeakMoment:
    """The peak of a step.

    Attributes:
        bytes: bytes allocated at the peak.
        call: the stage module that runs at the peak.
        value: the value that is being computed.
        module: path of the user's module that it belongs to.
        live: the values alive at the peak, largest first.
        line: file and line of the user's program that computes the value, as ``model.py:12``; empty if unknown.
    """

    bytes: int
    call: str
    value: str
    module: str
    live: tuple[LiveValue, ...]
    line: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Memory of a device between steps, beside which a step is planned. In bytes.

    Attributes:
        parameters: the model's parameters and buffers.
        optimizer: the optimizer's state, and copies of parameters that it steps in their place.
        optimizer_name: its class; empty: no optimizer was given.
        device: all that the device has; 0: there is no limit.
    """

    parameters: int
    optimizer: int
    optimizer_name: str
    device: int


_LINK_BUSY = 0.9
"""Share of the shorter of forward and backward from which on the link to the host is busy."""
_LONGER = 0.02
"""Up to such a share of waiting, or of recomputation, a step is bound by its operations."""

CPU_RATES = "table of the CPU"
"""Rates of a plan for the CPU, which its text does not name."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Decisions:
    """All decisions of one compilation: the data of a :class:`roundpipe_fx.Plan`.

    Attributes:
        stages: the stages in order.
        segments: how many segments the forward was cut into, and how many structurally different ones.
        recompute: the option it was made with.
        budget: bytes that a step may allocate at most at one time; ``None``: no limit.
        peak: when a step allocates most at one time, predicted by simulating the emitted programs; if pipelined, when
            one microbatch that runs alone does.
        trade_off: (peak bytes, modelled seconds of recomputation) of all plans that were considered; empty without a
            budget.
        assumed: what data-dependent sizes are taken to be, by symbol (the others count with their upper bounds), and
            the bytes that operators allocate for themselves where that depends on data.
        sizes: the largest inputs that it was made for and is used with, by input and dimension; empty where all sizes
            are fixed, or the budget is no number of bytes.
        training: whether there is a backward.
        tiles: regions that are carried out in tiles; sums over tiles round differently.
        dropped_bytes: bytes of the outputs that the caller is assumed to drop before the backward begins.
        unread_bytes: bytes of those among them that the caller is assumed not to read either, so that they need not be
            computed as a whole.
        gathered_bytes: bytes that FSDP2 allocates at most at one time to gather parameters, beside ``budget`` and
            ``peak``: of a budget in bytes they are set aside.
        bucket_bytes: bytes of the buckets of the DistributedDataParallel around the model, or inside: it allocates them
            when it is made, not in a step.
        library_bytes: bytes that libraries keep on the devices for their threads and streams (workspaces of cuBLAS),
            when the plan is made: they are allocated before a step begins, and never freed.
        on_host: names of the saved values that are on the host between forward and backward. (Those of a pipeline are
            in ``pipeline.offloaded``.)
        pipeline: how a step is pipelined, if it is; the rest of the plan is then that of one microbatch.
        model: memory of the device beside the step, where it was planned for one that is not there.
        options: options that differ from their defaults, the device and the stage compiler, as text. They are no
            decisions: plans that were asked for differently may be equal.
        rates: the table of a device's rates with which seconds are modelled; empty: not known.
        assumed_host_bytes: memory that the host is assumed to have, where the plan is for another machine and no
            ``host_budget`` was given; 0: it is known.
        host_link_share: modelled share of the forward, or of the backward if that is shorter, in which the link carries
            values that leave for the host.
    """

    stages: tuple[PlannedStage, ...]
    segments: tuple[int, int]
    recompute: str
    budget: int | None
    peak: PeakMoment
    trade_off: tuple[tuple[int, float], ...]
    assumed: Mapping[str, int]
    sizes: Mapping[str, int]
    training: bool
    tiles: tuple[PlannedTiles, ...] = ()
    dropped_bytes: int = 0
    unread_bytes: int = 0
    gathered_bytes: int = 0
    bucket_bytes: int = 0
    library_bytes: int = 0
    on_host: tuple[str, ...] = ()
    pipeline: PlannedPipeline | None = None
    model: ModelMemory | None = None
    options: Mapping[str, str] = field(compare=False, default_factory=dict)
    rates: str = ""
    assumed_host_bytes: int = 0
    host_link_share: float = 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes that a step needs on the host for values that leave the devices; for an offloaded model also, in pinned
        memory, for its weights and their gradients, and where the optimizer is known, for its state and copies of
        parameters."""
        if self.pipeline is not None:
            return self.pipeline.host_bytes
        return sum(value.bytes for value in self._saved if value.name in self.on_host)

    @property
    def is_bound_by_host_link(self) -> bool:
        """Return whether a faster link to the host would shorten the step: the device waits for it, or it is busy and
        values are recomputed."""
        once = sum(stage.forward_seconds + stage.backward_seconds for stage in self.stages)
        recomputed = sum(stage.recompute_seconds for stage in self.stages)
        if self.host_wait > _LONGER:
            return True
        return self.host_link_share >= _LINK_BUSY and recomputed > _LONGER * once

    @property
    def host_wait(self) -> float:
        """The modelled share of a step in which its only device waits for copies from the host or to it."""
        pipeline = self.pipeline
        if pipeline is None or len(pipeline.devices) > 1 or not (pipeline.sent_bytes or pipeline.host_to_device_bytes):
            return 0.0
        return pipeline.bubble

    @property
    def saved_bytes(self) -> int:
        """Bytes of computed values that the forward keeps on the device for the backward, hoisted values and RNG states
        included."""
        return sum(value.bytes for value in self._saved if value.name not in self.on_host)

    @property
    def _saved(self) -> list[PlannedValue]:
        return [value for stage in self.stages for value in (*stage.saved, *stage.hoisted)]

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of a step: bytes allocated at most at one time beyond what was allocated when it began.

        The forward's outputs count until the backward is over, since the caller may hold them. Of a pipelined step, the
        bytes of the device that needs most, with all its microbatches in flight: what a budget bounds. (That of one
        microbatch which runs alone is ``peak.bytes``; all devices are in ``pipeline.peak_bytes``.)
        """
        return self.peak.bytes if self.pipeline is None else max(self.pipeline.peak_bytes)

    @property
    def forward_seconds(self) -> float:
        """Modelled seconds of the forward."""
        return sum(stage.forward_seconds for stage in self.stages)

    @property
    def recompute_seconds(self) -> float:
        """Modelled seconds of recomputation in the backward."""
        return sum(stage.recompute_seconds for stage in self.stages)


def tiles_text(tiles: Sequence[PlannedTiles]) -> str:
    """All that is carried out in tiles, in one line; equal regions are named once."""
    alike: dict[tuple[str, int], list[PlannedTiles]] = {}
    for planned in tiles:
        alike.setdefault((planned.type, planned.tiles), []).append(planned)
    parts = []
    for (kind, count), same in list(alike.items())[:_REGIONS]:
        modules = list(dict.fromkeys(planned.module or "the model" for planned in same))
        suffix = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        parts.append(f"{modules[0]}{suffix} ({kind}, {bytes_text(same[0].bytes)}) in {count} tiles")
    if len(alike) > _REGIONS:
        parts.append(f"… {len(alike) - _REGIONS} more")
    return "; ".join(parts)


@dataclass(frozen=True, kw_only=True)
class ValueOnHost:
    """A value that is on the host between forward and backward.

    Attributes:
        value: name of the value in the graph.
        freed: the stage module after whose call in the forward its memory on the device is freed.
        reloaded: the stage module before whose call in the backward its copy to the device begins.
        back: the one that reads it first there.
    """

    value: str
    name: str
    freed: str
    reloaded: str
    back: str
