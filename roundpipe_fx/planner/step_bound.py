"""Bounds for a step on divided devices: seconds and bytes that no plan of the division stays below.

A bound takes milliseconds where a plan takes seconds, so most ways to divide many devices need no plan. For a device of
a pipeline of which ``w`` seconds of every microbatch run there::

    first stage's forward can begin    all microbatches run here           backwards of earlier stages, or
    (or its parameters are gathered)                                       the last gradients are reduced
    ├── head ────────────────────────┼── microbatches × (w + r) ─────────┼── tail ──┤

``r`` is what is recomputed at the least: when most microbatches are in flight, what they save must fit beside
gradients, gathered parameters and the largest operation. Values whose recomputation takes the fewest seconds a byte are
dropped first, each as if everything that it is computed from were available, so no plan recomputes for less. Tiles
(:mod:`roundpipe_fx.planner.tile_more`) do, so for them this part is left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.cost.network import Network
from roundpipe_fx.planner.segment_costs import SegmentCosts
from roundpipe_fx.schedules import (
    SCHEDULES,
    ActionKind,
    ScheduleSpec,
    StageAction,
    StageGraph,
    StepCosts,
    chain,
    simulate_time,
)
from roundpipe_fx.schedules.building import make_schedule
from roundpipe_fx.schedules.data_parallel import DataParallel
from roundpipe_fx.schedules.sharding import ShardedCosts, find_gaps, padded_bytes
from roundpipe_fx.schedules.step_costs import device_orders
from roundpipe_fx.schedules.timetable import NUMBER

_ROUNDING = 1e-9
"""Share of a bound by which sums in another order may differ."""
_MOST_SIMULATED = 20_000
"""Microbatches times stages of a step that is simulated."""
_ROUNDS = 4
"""Times as many microbatches as a pipeline has devices: with more, no more are in flight."""


@dataclass(frozen=True, kw_only=True, order=True)
class Division:
    """A way to divide devices, and to run a step on them.

    Attributes:
        pipeline: how many devices a replica has.
        replicas: how many replicas there are.
        sharded: whether parameters are sharded across them.
        stages: into how many stages the model is cut.
        schedule: name of the schedule.
    """

    pipeline: int
    replicas: int
    sharded: bool
    stages: int
    schedule: str

    @property
    def spec(self) -> ScheduleSpec:
        """The specification of the schedule."""
        return SCHEDULES[self.schedule]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A lower bound of a step.

    Attributes:
        seconds: of a step without tiles; infinite where none fits.
        seconds_in_tiles: of a step with any tiles; infinite where none fits.
        bytes: of the fullest device, with weights and optimizer state.
        recompute_seconds: for each device, seconds that it recomputes of each microbatch.
    """

    seconds: float
    seconds_in_tiles: float
    bytes: int
    recompute_seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """A graph that is cut into stages.

    Attributes:
        forward: seconds of each forward.
        backward: seconds of each backward.
        begins: seconds at which each forward can begin at the earliest.
        late: seconds of each backward that wait for incoming gradients.
        left: seconds that backwards take after each stage's at the least.
    """

    segments: tuple[range, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    late: tuple[float, ...]
    begins: tuple[float, ...]
    left: tuple[float, ...]


@dataclass(kw_only=True)
class StepBounds:
    """Bounds of the divisions of one model's step.

    Attributes:
        microbatches: of the whole batch.
        network: the links between devices.
        memory: bytes of a device for a step and, if ``with_weights``, for weights and optimizer state; infinite: no
            limit.
        with_weights: whether they are counted.
        optimizer_share: bytes of the optimizer's state for each byte of a parameter.
        halves: whether all forwards run before all backwards.
    """

    costs: SegmentCosts
    microbatches: int
    network: Network
    memory: float
    with_weights: bool
    optimizer_share: float
    halves: bool

    def __post_init__(self) -> None:
        self._cut: dict[int, _Stages] = {}
        self._known: dict[Division, Bound] = {}
        # Parameters with gradients: only these are averaged, gathered and updated.
        trained = {number for of_segment in self.costs.gradients for number in of_segment}
        self._sizes = {number: tensor_bytes([tensor]) for number, tensor in self.costs.tensors.items()}
        self._trained = frozenset(trained)

    def of(self, division: Division) -> Bound:
        """The bound of a division."""
        if division not in self._known:
            self._known[division] = self._bound(division)
        return self._known[division]

    def _bound(self, division: Division) -> Bound:
        stages = self._stages(division.stages)
        devices = self._devices(division)
        parallel = self._parallel(division)
        shared = self._late_parameters(division, stages, devices)
        weights = [self._weight_bytes(division, stages, numbers) for numbers, _ in devices]
        fixed = max(weights, default=0) if self.with_weights else 0
        # One gradient, or parameter, is copied where it is averaged, or gathered, on all devices alike.
        copied = (
            max((self._padded_bytes(division, number) for number in self._trained), default=0)
            if parallel is not None
            else 0
        )
        seconds = in_tiles = 0.0
        most, recomputed = 0, []
        # The step is at least as long as on each device; the fullest device is found on the way.
        for (numbers, order), weight in zip(devices, weights, strict=True):
            gradients = self._gradient_bytes(division, stages, numbers)
            lowest, recompute = self._least_recomputation(
                division, stages, order, gradients, self.memory - fixed - copied
            )
            head, tail, link = self._fill_drain_seconds(division, stages, numbers, gradients, parallel, shared)
            busy = sum(stages.forward[stage] + stages.backward[stage] for stage in numbers)
            count = self.microbatches // division.replicas
            # Weights and gradients alone exceed the memory: no recomputation helps.
            if fixed + sum(gradients[-1].values()) > self.memory:
                recompute = busy = math.inf
            recomputed.append(recompute)
            # head + microbatches × (busy + recompute) + tail, or the time of the link, if that is longer.
            seconds = max(seconds, head + count * (busy + recompute) + tail, link)
            in_tiles = max(in_tiles, head + count * busy + tail, link)
            most = max(most, weight + copied + lowest)
        exact = 1 - _ROUNDING
        return Bound(
            seconds=seconds * exact, seconds_in_tiles=in_tiles * exact, bytes=most, recompute_seconds=tuple(recomputed)
        )

    def simulate_seconds(self, division: Division, estimate: bool) -> float:
        """Seconds of a step as its schedule is simulated with the costs of segments, everything that can stay gathered.

        Args:
            estimate: whether results are sent, and recomputed at the least; else it is a bound.

        Returns:
            the seconds; those of :meth:`of` where a step has too many actions to be simulated for each division, or the
            parts of split backwards would have to be known for a bound.
        """
        count, bound = self.microbatches // division.replicas, self.of(division)
        split = division.spec.splits_backward
        # Simulating a division takes longer with each action, so large ones keep the bound.
        if count * division.stages > _MOST_SIMULATED or (split and not estimate) or math.isinf(bound.seconds):
            return bound.seconds
        stages = self._stages(division.stages)
        graph = chain(division.stages, split=split, recompute=True)
        schedule = make_schedule(division.spec, graph, StepCosts(seconds={}), division.pipeline, count)
        schedule = schedule.halves() if self.halves else schedule
        device_of = {stage: device for device, order in enumerate(schedule.orders) for stage in np.unique(order[:, 1])}
        # An estimate includes what the bound says is recomputed, divided equally among the device's stages.
        recompute = bound.recompute_seconds if estimate else [0.0] * division.pipeline
        shares: dict[StageAction, float] = {}
        for stage, (backward, late) in enumerate(zip(stages.backward, stages.late, strict=True)):
            count_there = sum(device == device_of[stage] for device in device_of.values())
            shares[ActionKind.FORWARD, stage] = stages.forward[stage]
            shares[ActionKind.RECOMPUTE, stage] = 0.0 if estimate else backward - late
            seconds = backward + recompute[device_of[stage]] / count_there if estimate else late
            for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT) if split else (ActionKind.BACKWARD,):
                shares[kind, stage] = seconds / (2 if split else 1)
        costs = self._step_costs(division, stages, graph, shares, estimate)
        kept = (
            [gap for order in device_orders(schedule) for gap in find_gaps(order, costs.sharded)]
            if costs.sharded
            else []
        )
        return simulate_time(schedule, graph, costs, kept=kept).makespan * (1 - _ROUNDING)

    def _step_costs(
        self,
        division: Division,
        stages: _Stages,
        graph: StageGraph,
        seconds: Mapping[StageAction, float],
        sends: bool,
    ) -> StepCosts:
        """Costs of the stage actions, without what is held."""
        last = ActionKind.BACKWARD_WEIGHT if division.spec.splits_backward else ActionKind.BACKWARD
        gradients: dict[StageAction, dict[int, int]] = {}
        reads: dict[StageAction, tuple[int, ...]] = {}
        sent: dict[tuple[StageAction, StageAction], int] = {}
        for stage, members in enumerate(stages.segments):
            added = {number for at in members for number in self.costs.gradients[at]}
            gradients[last, stage] = {number: self._sizes[number] for number in added}
            read = tuple(sorted(self._parameters_read(stages, [stage]) & self._trained))
            reads |= {step: read for step in graph.steps if step[1] == stage}
        if sends:
            for step, sources in graph.reads.items():
                for source in sources:
                    if source[1] != step[1]:
                        entered = stages.segments[max(step[1], source[1])][0]
                        sent[source, step] = self.costs.entry_bytes[entered]
        sharded = None
        if division.sharded:
            whole = {number: self._padded_bytes(division, number) for number in self._trained}
            sharded = ShardedCosts(replicas=division.replicas, whole_bytes=whole, reads=reads)
        return StepCosts(
            seconds=seconds,
            base_bytes=gradients,
            parameters=self._trained,
            sent_bytes=sent,
            sharded=sharded,
            network=self.network,
            data_parallel=self._parallel(division),
        )

    def _stages(self, count: int) -> _Stages:
        if count not in self._cut:
            costs = self.costs
            starts = costs.starts(count)
            segments = tuple(range(*ends) for ends in zip(starts, [*starts[1:], costs.count], strict=True))
            stage_of = {segment: stage for stage, members in enumerate(segments) for segment in members}
            forward = tuple(
                sum(costs.forward_seconds[member] for member in segments_of_stage) for segments_of_stage in segments
            )
            backward = tuple(
                sum(costs.backward_seconds[member] for member in segments_of_stage) for segments_of_stage in segments
            )
            late = tuple(
                sum(costs.late_seconds[member] for member in segments_of_stage) for segments_of_stage in segments
            )
            begins = [0.0] * count
            # Longest path: a stage begins when the stages that it reads have ended.
            for stage, segments_of_stage in enumerate(segments):
                sources = {
                    stage_of[source] for member in segments_of_stage for source in costs.forward_reads[member]
                } - {stage}
                begins[stage] = max((begins[earlier] + forward[earlier] for earlier in sources), default=0.0)
            left = [0.0] * count
            # Stages in ascending order: an earlier stage's backward comes later, and is already known for those that
            # wait for it.
            # Backwards of earlier stages wait for those of later ones.
            for stage, segments_of_stage in enumerate(segments):
                for source in {
                    stage_of[source] for member in segments_of_stage for source in costs.backward_reads[member]
                } - {stage}:
                    left[source] = max(left[source], late[stage] + left[stage])
            self._cut[count] = _Stages(
                segments=segments,
                forward=forward,
                backward=backward,
                late=late,
                begins=tuple(begins),
                left=tuple(left),
            )
        return self._cut[count]

    def _devices(self, division: Division) -> list[tuple[list[int], np.ndarray]]:
        """Of each device, its stages in order, and its actions for as many microbatches as fill the pipeline."""
        # The order of a few rounds tells how many microbatches are in flight; more of them would only repeat it.
        few = min(self.microbatches // division.replicas, _ROUNDS * division.pipeline)
        graph = chain(division.stages, split=division.spec.splits_backward)
        schedule = make_schedule(division.spec, graph, StepCosts(seconds={}), division.pipeline, few)
        if self.halves:
            schedule = schedule.halves()
        return [(np.unique(order[:, 1]).tolist(), order) for order in schedule.orders]

    def _parallel(self, division: Division) -> DataParallel | None:
        if division.replicas == 1:
            return None
        ring = self.network.ring(division.replicas, division.pipeline)
        return DataParallel(ring=ring, sharded=division.sharded)

    def _late_parameters(
        self, division: Division, stages: _Stages, devices: Sequence[tuple[Sequence[int], np.ndarray]]
    ) -> frozenset[int]:
        """Parameters with gradients on several devices, which are reduced at some other time."""
        devices_of: dict[int, int] = {}
        for stages_there, _ in devices:
            added = {
                number for stage in stages_there for at in stages.segments[stage] for number in self.costs.gradients[at]
            }
            for number in added:
                devices_of[number] = devices_of.get(number, 0) + 1
        return frozenset(number for number, count in devices_of.items() if count > 1)

    def _parameters_read(self, stages: _Stages, numbers: Collection[int]) -> set[int]:
        return {number for stage in numbers for at in stages.segments[stage] for number in self.costs.parameters[at]}

    def _weight_bytes(self, division: Division, stages: _Stages, numbers: Collection[int]) -> int:
        """Bytes of a device between steps."""
        whole = {number: self._shard_bytes(division, number) for number in self._parameters_read(stages, numbers)}
        trained = sum(size for number, size in whole.items() if number in self._trained)
        return sum(whole.values()) + int(self.optimizer_share * trained)

    def _shard_bytes(self, division: Division, number: int) -> int:
        """Bytes that a replica has of a parameter."""
        tensor = self.costs.tensors[number]
        if division.sharded and tensor.dim() and (tensor.is_floating_point() or tensor.is_complex()):
            return padded_bytes(tensor, division.replicas) // division.replicas
        return self._sizes[number]

    def _gradient_bytes(self, division: Division, stages: _Stages, numbers: Sequence[int]) -> list[dict[int, int]]:
        """Bytes of the gradients of a device, by number: of its first stage, of its first two, …, of all."""
        # Entry k: gradients once the k first stages of this device have begun their backward.
        bytes_so_far: list[dict[int, int]] = [{}]
        for stage in numbers:
            added = {
                number: self._shard_bytes(division, number) if division.sharded else size
                for at in stages.segments[stage]
                for number, size in self.costs.gradients[at].items()
            }
            bytes_so_far.append({**bytes_so_far[-1], **added})
        return bytes_so_far

    def _least_recomputation(
        self,
        division: Division,
        stages: _Stages,
        order: np.ndarray,
        gradients: Sequence[dict[int, int]],
        spare: float,
    ) -> tuple[int, float]:
        """Bytes that a device holds at the least, and seconds that it recomputes of each microbatch at the least.

        It is looked at after the action with which most is saved, and during the one that needs most beside what other
        microbatches have saved.
        """
        numbers = np.unique(order[:, 1]).tolist()
        saved = {stage: [value for at in stages.segments[stage] for value in self.costs.saved[at]] for stage in numbers}
        column = np.searchsorted(numbers, order[:, 1])
        forwards = order[:, 0] == NUMBER[ActionKind.FORWARD]
        begins = np.isin(order[:, 0], [NUMBER[ActionKind.BACKWARD], NUMBER[ActionKind.BACKWARD_INPUT]])
        # +1 when a forward saves, -1 when the backward that reads begins; the running sum is what is in flight.
        change = np.zeros((len(order) + 1, len(numbers)), dtype=np.int64)
        change[np.arange(len(order)) + 1, column] = forwards.astype(np.int64) - begins
        flight = np.cumsum(change, axis=0)  # by stage, microbatches that are saved before an action
        if division.spec.holds_all_microbatches or self.halves:  # all of them are in flight
            few = int(order[:, 2].max()) + 1
            flight *= self.microbatches // division.replicas // few
        others = np.where(forwards[:, None], flight[:-1], flight[1:])
        gradient_bytes = self._gradient_bytes_before(division, stages, order, begins, numbers, gradients)
        during = (
            gradient_bytes[:-1]
            + self._peak_operation_bytes(division, stages, numbers)[forwards.astype(np.int64), column]
        )
        whole = np.array([sum(size for size, _ in saved[stage]) for stage in numbers], dtype=np.int64)
        least = [sum(size for size, seconds in saved[stage] if math.isinf(seconds)) for stage in numbers]
        lowest, recompute_seconds = 0, 0.0
        for counts, fixed in ((flight, gradient_bytes), (others, during)):
            lowest = max(lowest, int((counts @ np.array(least, dtype=np.int64) + fixed).max()))
            levels = counts @ whole + fixed
            position = int(levels.argmax())
            values = [
                (seconds, int(counts[position, index]) * size)
                for index, stage in enumerate(numbers)
                for size, seconds in saved[stage]
                if size and counts[position, index]
            ]
            recompute_seconds = max(recompute_seconds, _cheapest_recomputation(values, int(levels[position]) - spare))
        return lowest, recompute_seconds

    def _gradient_bytes_before(
        self,
        division: Division,
        stages: _Stages,
        order: np.ndarray,
        begins: np.ndarray,
        numbers: Sequence[int],
        gradients: Sequence[dict[int, int]],
    ) -> np.ndarray:
        """Bytes of gradients that are there before each action, and after all."""
        gradient_bytes = np.zeros(len(order) + 1, dtype=np.int64)
        for position, stage in enumerate(numbers):
            (at,) = np.nonzero(begins & (order[:, 1] == stage))
            if len(at):
                added = gradients[position + 1].keys() - gradients[position].keys()
                # Whole gradients while microbatches still add to them; rows from then on, if they are sharded.
                gradient_bytes[at[0] + 1 : at[-1] + 1] += sum(self._padded_bytes(division, number) for number in added)
                gradient_bytes[at[-1] + 1 :] += sum(gradients[-1][number] for number in added)  # reduced to rows
        return gradient_bytes

    def _peak_operation_bytes(self, division: Division, stages: _Stages, numbers: Sequence[int]) -> np.ndarray:
        """Bytes of the operation that needs most, by kind (forwards last) and stage, with gathered parameters."""
        peaks = self.costs.backward_peak, self.costs.forward_peak
        gathered = [
            sum(
                self._padded_bytes(division, number)
                for number in self._parameters_read(stages, [stage])
                if number in self._trained
            )
            for stage in numbers
        ]
        if not division.sharded:
            gathered = [0] * len(numbers)
        return np.array(
            [
                [
                    max(segment_peaks[at] for at in stages.segments[stage]) + size
                    for stage, size in zip(numbers, gathered, strict=True)
                ]
                for segment_peaks in peaks
            ],
            dtype=np.int64,
        )

    def _fill_drain_seconds(
        self,
        division: Division,
        stages: _Stages,
        numbers: Sequence[int],
        gradients: Sequence[dict[int, int]],
        parallel: DataParallel | None,
        shared: frozenset[int],
    ) -> tuple[float, float, float]:
        """Seconds at the least before a device's first action, after its last one, and of all that its link carries."""
        first = min(numbers)
        head = stages.begins[first]
        tail = 0.0 if division.spec.splits_backward else stages.left[first]
        if parallel is None:
            return head, tail, 0.0
        lowest = gradients[1].keys() - shared
        sizes = {number: self._padded_bytes(division, number) for number in gradients[-1].keys() - shared}
        reduced = parallel.reduce_seconds(sizes[number] for number in lowest)
        link = parallel.reduce_seconds(sizes.values())
        if division.sharded:
            read = {number for number in self._parameters_read(stages, numbers) if number in self._trained}
            gather = parallel.ring.gather_seconds
            link += parallel.seconds([self._padded_bytes(division, number) for number in read], gather)
            firsts = [number for number in self._parameters_read(stages, [first]) if number in self._trained]
            # The first forward waits for its parameters to be gathered, whatever happens before.
            head = max(head, parallel.seconds([self._padded_bytes(division, number) for number in firsts], gather))
        return head, max(tail, reduced), link

    def _padded_bytes(self, division: Division, number: int) -> int:
        tensor = self.costs.tensors[number]
        return padded_bytes(tensor, division.replicas) if division.sharded and tensor.dim() else self._sizes[number]


def _cheapest_recomputation(values: Sequence[tuple[float, int]], over: float) -> float:
    """Seconds of recomputing so many bytes at the least, the last value in part.

    Args:
        values: seconds and bytes of each.
        over: bytes that must not be saved.
    """
    seconds = 0.0
    if over <= 0:
        return seconds
    # Fractional knapsack: values with the fewest seconds per byte first, the last one in part. So this is a lower
    # bound.
    for seconds_of_value, size in sorted(values, key=lambda value: value[0] / value[1]):
        if math.isinf(seconds_of_value):
            break
        if size >= over:
            return seconds + seconds_of_value * over / size
        seconds, over = seconds + seconds_of_value, over - size
    return math.inf
