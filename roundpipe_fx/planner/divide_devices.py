"""Divides a number of devices into replicas of a pipeline, with the schedule of the shortest modelled step that fits.

All divisions run the same microbatches, so that one graph is planned and the batch is the same::

    1,024 devices, 2,048 microbatches     64 × 16    each of 64 replicas has 16 devices and 32 microbatches
                                         256 × 4     each of 256 replicas has 4 devices and 8 microbatches

A division is a number of replicas, whether parameters are sharded across them, a number of stages and a schedule. Each
has a bound (:mod:`roundpipe_fx.planner.step_bound`), and the lowest of them an estimate, in whose order they are
planned, unless their bound is no lower than the shortest step so far. Once none is left, no other division has a
shorter step. Where this takes more than a few plans of a large model, the search ends without that proof, and the plan
says so. Tiles are considered where no division fits without, since their sums round differently."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence

from roundpipe_fx.budget import Found, Infeasible, Result, bytes_text
from roundpipe_fx.ir.decisions import PlannedDivision
from roundpipe_fx.pipeline.lowered_pipeline import LoweredPipeline
from roundpipe_fx.pipeline.settings import Pipelining, Undivided
from roundpipe_fx.planner.step_bound import Division, StepBounds
from roundpipe_fx.schedules import SCHEDULES, ScheduleSpec
from roundpipe_fx.schedules.one_f_one_b import ONE_F_ONE_B
from roundpipe_fx.torch_private import PassedThrough

log = logging.getLogger(__name__)

_ESTIMATED = 48
"""Number of divisions, of those with the lowest bounds, that are simulated to begin with the most promising."""
_MOST_SEGMENTS = 140
"""Segments of all graphs that are planned at most, without tiles and with them."""


class NoDivisionError(PassedThrough, ValueError):
    """Devices cannot be divided. Raised before anything is planned."""


Lower = Callable[[Division, bool], Result[LoweredPipeline]]
"""Lowers a division, with tiles where it takes them, or without."""


def enumerate_divisions(
    undivided: Undivided, segments: int, stages: int | str, schedules: Sequence[str], only_sharded: bool
) -> list[Division]:
    """All divisions of a number of devices that run whole microbatches.

    Args:
        undivided: the devices and microbatches.
        segments: into how many stages the model can be cut at most.
        stages: how many; ``"auto"``: one, two, four, … on each device.
        schedules: names of those to choose from.
        only_sharded: whether parameters must be sharded across replicas.

    Raises:
        NoDivisionError: there is none.
    """
    divisions = []
    # A division uses all devices and all microbatches: both numbers have to divide.
    for pipeline in (size for size in range(1, undivided.devices + 1) if undivided.devices % size == 0):
        replicas = undivided.devices // pipeline
        if undivided.microbatches % replicas:
            continue
        for sharded in [False, True] if not only_sharded and replicas > 1 else [replicas > 1]:
            for schedule in schedules:
                spec = SCHEDULES[schedule]
                is_another = spec is not ONE_F_ONE_B and ONE_F_ONE_B.name in schedules
                # Schedules that order these actions as 1F1B does are not tried twice.
                if is_another and spec.orders_as(ONE_F_ONE_B, pipeline, undivided.microbatches // replicas):
                    continue
                counts = [stages] if isinstance(stages, int) else _stage_counts(pipeline, replicas, spec)
                divisions += [
                    Division(pipeline=pipeline, replicas=replicas, sharded=sharded, stages=count, schedule=schedule)
                    for count in counts
                    if pipeline <= count <= segments
                ]
    if not divisions:
        most = min(stages, segments) if isinstance(stages, int) else segments
        unit = "devices" if undivided.group == 1 else f"groups of {undivided.group} devices"
        raise NoDivisionError(
            f"mesh_shape={undivided.total} with {undivided.microbatches} microbatches: "
            f"no number of replicas divides both, with at most {most} {unit} each, which is into how many stages the "
            f"model is cut. Give a batch with a multiple of {undivided.devices} microbatches, or another number of "
            "devices."
        )
    return divisions


def _stage_counts(pipeline: int, replicas: int, spec: ScheduleSpec) -> list[int]:
    """Stages to try: more on a device gather and reduce in smaller parts, and fill the pipeline of some schedules."""
    powers = range(16 if spec.gains_by_stages or replicas > 1 else 1)
    # Powers of two times the devices: more stages than that gain little.
    return [pipeline * spec.stages_per_device << power for power in powers]


def settings_of_division(pipelining: Pipelining, division: Division) -> Pipelining:
    """The settings of one division.

    Args:
        pipelining: those of undivided devices.
    """
    assert pipelining.undivided is not None
    return dataclasses.replace(
        pipelining,
        devices=pipelining.devices[:1] * division.pipeline,
        microbatches=pipelining.undivided.microbatches // division.replicas,
        schedule=SCHEDULES[division.schedule],
        replicas=division.replicas,
        sharded=division.sharded,
        undivided=None,
    )


def lower_divided(
    undivided: Undivided, divisions: Sequence[Division], bounds: StepBounds, lower: Lower
) -> Result[LoweredPipeline]:
    """The pipeline of the division with the shortest step.

    Args:
        divisions: all that there are.
        bounds: of the model's step.
    """
    most = max(_MOST_SEGMENTS // bounds.costs.count, 2)
    search = _DivisionSearch(lower, divisions, bounds, most)
    search.run()
    if search.best is None:
        search.tiles = True
        search.run()
    if search.best is None:
        return search.refusal(undivided)
    return Found(dataclasses.replace(search.best[1], divisions=search.considered_divisions()))


class _DivisionSearch:
    """Results while divisions are planned.

    Attributes:
        best: seconds of the shortest step so far, and its pipeline; ``None``: none fits yet.
        tiles: whether operations may be carried out in tiles.
    """

    def __init__(self, lower: Lower, divisions: Sequence[Division], bounds: StepBounds, most: int) -> None:
        self.best: tuple[float, LoweredPipeline] | None = None
        self.tiles = False
        self._lower = lower
        self._simulated = functools.cache(bounds.simulate_seconds)
        self._bounds = {division: bounds.of(division) for division in divisions}
        self._most = most
        """Number of plans that are made at most, without tiles and with them."""
        self._planned: dict[Division, tuple[float, int]] = {}
        """Seconds and bytes of the fullest device."""
        self._refused: dict[Division, Infeasible[str]] = {}
        self._chosen: Division | None = None

    def run(self) -> None:
        """Plan divisions until no other has a shorter step, or until enough are planned."""
        left = [division for division in self._bounds if math.isfinite(self._least_seconds(division))]
        # By lower bound; the first ones by a simulated estimate, since bounds of most are equal.
        left.sort(key=lambda candidate: (self._least_seconds(candidate), self._bounds[candidate].bytes, candidate))
        first = left[:_ESTIMATED]
        first.sort(key=lambda candidate: (self._simulated(candidate, True), self._bounds[candidate].bytes, candidate))
        left[: len(first)] = first
        count = 0
        while left and count < self._most:
            # Where the first half did not fit, those that need least may.
            leanest = self.best is None and count >= self._most / 2
            division = (
                min(left, key=lambda candidate: (self._bounds[candidate].bytes, candidate)) if leanest else left[0]
            )
            left.remove(division)
            # Branch and bound: a division whose bound is no lower than the best step needs no plan.
            if self.best is None or self._refined_seconds(division) < self.best[0]:
                self._plan(division)
                count += 1

    def _least_seconds(self, division: Division) -> float:
        """Seconds of a step at the least."""
        bound = self._bounds[division]
        return bound.seconds_in_tiles if self.tiles else bound.seconds

    def _plan(self, division: Division) -> None:
        result = self._lower(division, self.tiles)
        if isinstance(result, Infeasible):
            self._refused[division] = result
            log.info("%s does not fit: %s", division, result.bottleneck)
            return
        pipeline = result.value
        timing = pipeline.predict(pipeline.pipelining.microbatches)
        parts = *pipeline.bytes_between_steps(timing.schedule), timing.peak_bytes
        self._planned[division] = timing.makespan, max(map(sum, zip(*parts, strict=True)))
        log.info("%s: %.3f ms", division, timing.makespan * 1e3)
        if self.best is None or timing.makespan < self.best[0]:
            self.best, self._chosen = (timing.makespan, pipeline), division

    def considered_divisions(self) -> tuple[PlannedDivision, ...]:
        """The best known division for each number of replicas, sharded or not, as the plan reports it."""
        # One row per shape of the mesh: the chosen one, or the best of its kind.
        groups: dict[tuple[int, bool], list[Division]] = {}
        for division in self._bounds:
            groups.setdefault((division.pipeline, division.sharded), []).append(division)
        return tuple(self._planned_division(min(group, key=self._rank)) for group in groups.values())

    def _rank(self, division: Division) -> tuple[bool, float, int, Division]:
        if division in self._planned:
            seconds, size = self._planned[division]
            return division != self._chosen, seconds, size, division
        refused = division in self._refused
        return True, math.inf if refused else self._refined_seconds(division), self._bounds[division].bytes, division

    def _refined_seconds(self, division: Division) -> float:
        """The lower bound of a step, raised by simulation if that may rule the division out."""
        least = self._least_seconds(division)
        if self.tiles or self.best is None or least >= self.best[0]:
            return least
        return max(least, self._simulated(division, False))

    def _planned_division(self, division: Division) -> PlannedDivision:
        bound = self._bounds[division]
        planned = division in self._planned
        seconds, size = self._planned.get(division, (self._refined_seconds(division), bound.bytes))
        fits = planned or (division not in self._refused and math.isfinite(seconds))
        return PlannedDivision(
            pipeline=division.pipeline,
            replicas=division.replicas,
            sharded=division.sharded,
            stages=division.stages,
            schedule=division.schedule,
            seconds=seconds if fits else None,
            bytes=size,
            fits=fits,
            planned=planned,
            chosen=division == self._chosen,
        )

    def refusal(self, undivided: Undivided) -> Infeasible[str]:
        """The result where nothing fits."""
        least = min(self._bounds, key=lambda division: (self._bounds[division].bytes, division))
        refused = min(self._refused.values(), key=lambda infeasible: infeasible.minimum, default=None)
        needed = self._bounds[least].bytes
        reason = (
            f" Of those that were planned, the one that needs least: {refused.bottleneck}"
            if refused is not None
            else ""
        )
        text = (
            f"none of {len(self._bounds)} ways to divide {undivided.text} fits. {_describe(least)} needs at least "
            f"{bytes_text(needed)} on the fullest device. Use more devices, more and smaller microbatches, or a larger "
            f"budget.{reason}"
        )
        return Infeasible(minimum=refused.minimum if refused is not None else needed, bottleneck=text)


def _describe(division: Division) -> str:
    share = ", sharded" if division.sharded else ""
    return f"{division.replicas} × {division.pipeline}{share}, with {division.stages} stages and {division.schedule!r},"
