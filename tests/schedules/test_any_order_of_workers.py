"""Peaks hold in whatever order the threads of the workers are run: each waits only for the messages that it reads."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.schedules import (
    Action,
    ActionKind,
    Held,
    Schedule,
    StageAction,
    StageGraph,
    StepCosts,
    chain,
    gpipe,
    one_f_one_b,
    round_robin,
    simulate_time,
    slot_chain,
)
from roundpipe_fx.schedules.choose_offloads import OffloadRule, offloads_within
from roundpipe_fx.schedules.offloads import Offload
from roundpipe_fx.schedules.residency import resident, window_ranges

F, B = ActionKind.FORWARD, ActionKind.BACKWARD


class _Worker:
    """One worker of a walk, in the order of ``runtime/pipeline_run.py``. Others may run wherever it yields."""

    def __init__(self, device: int, walk: _Walk) -> None:
        self.device, self.walk = device, walk
        self.actions = walk.schedule.actions(device)
        self.weights: set[int] = set()
        self.sums: dict[int, int] = {}
        self.leaving = 0
        self.values: dict[tuple[int, int], int] = {}
        self.peak = 0
        turn = sum(action.kind is F for action in self.actions) if walk.schedule.forwards_before_backwards else 0
        self.turn = turn
        self.steps = self._run_all()

    def note(self, more: int = 0) -> None:
        sizes = {number: size for of_step in self.walk.costs.copied_bytes.values() for number, size in of_step.items()}
        weights = sum(sizes[number] for number in self.weights)
        live = weights + sum(self.sums.values()) + self.leaving + sum(self.values.values())
        self.peak = max(self.peak, live + more)

    def _run_all(self) -> Iterator[None]:
        if self.walk.schedule.forwards_before_backwards:
            yield from self._run(range(self.turn))
            self.walk.forwards_done += 1
            while self.walk.forwards_done < len(self.walk.workers):
                yield
        yield from self._run(range(self.turn, len(self.actions)))

    def _run(self, positions: range) -> Iterator[None]:
        windows = window_ranges([self.actions[position].stage for position in positions])
        copied = self.walk.costs.copied_bytes
        reads = [{n for p in window for n in copied[self.actions[positions[p]].step]} for window in windows]
        residents = dict(zip([positions[window.start] for window in windows], resident(reads), strict=True))
        for position in positions:
            if position in residents and self.walk.costs.on_host is not None:
                yield from self._exchange(residents[position])
            yield from self._move_values(position)
            action = self.actions[position]
            while not self.walk.has_sources(action):
                yield
            self.note(self.walk.costs.peak_bytes[action.step])
            self.sums |= self.walk.costs.base_bytes.get(action.step, {})
            self.walk.send_results(action)
            yield
            self._free_behind(position)
            yield
            self.walk.done.add((action.step, action.microbatch))
            yield
        if self.turn and positions.stop == self.turn:
            yield from self._move_values(self.turn, freed=True)
        yield from self._exchange(set())

    def _exchange(self, residents: set[int]) -> Iterator[None]:
        self.leaving, self.sums = sum(self.sums.values()), {}
        yield
        self.weights &= residents
        yield
        self.weights = residents
        self.note()
        yield

    def _move_values(self, position: int, freed: bool = False) -> Iterator[None]:
        offloads = [offload for offload in self.walk.offloads if offload.device == self.device]
        for offload in offloads:
            # What is freed between the halves belongs to the first of them.
            if offload.freed == position and (freed or not self.turn or position != self.turn):
                del self.values[offload.values[0][0], offload.microbatch]
        yield
        for offload in offloads:
            if offload.reloads == position and not freed:
                self.values[offload.values[0][0], offload.microbatch] = offload.bytes
        self.note()

    def _free_behind(self, position: int) -> None:
        steps = [(action.step, action.microbatch) for action in self.actions]
        for number, batch in [*self.values]:
            readers = {(reader, batch) for reader in self.walk.costs.held[number].readers}
            if not readers & {*steps[position + 1 :]}:
                del self.values[number, batch]


class _Walk:
    """A step of all workers, of which a random one runs next."""

    def __init__(self, schedule: Schedule, graph: StageGraph, costs: StepCosts, offloads: Sequence[Offload]) -> None:
        self.schedule, self.graph, self.costs, self.offloads = schedule, graph, costs, offloads
        self.done: set[tuple[StageAction, int]] = set()
        self.forwards_done = 0
        self.workers = [_Worker(device, self) for device in range(schedule.devices)]

    def has_sources(self, action: Action) -> bool:
        return all((source, action.microbatch) in self.done for source in self.graph.reads[action.step])

    def send_results(self, action: Action) -> None:
        batch = action.microbatch
        for number, held in enumerate(self.costs.held):
            for worker in self.workers if held.maker == action.step else ():
                if any(each.step in held.readers and each.microbatch == batch for each in worker.actions):
                    worker.values[number, batch] = held.bytes
                    worker.note()

    def peaks(self, choose: random.Random) -> list[int]:
        running = [*self.workers]
        while running:
            worker = choose.choice(running)
            for _ in range(choose.choice([1, 1, 5, 50])):  # some run far before the others do anything
                if next(worker.steps, self) is self:
                    running.remove(worker)
                    break
        return [worker.peak for worker in self.workers]


@st.composite
def _steps(draw: st.DrawFn) -> tuple[Schedule, StageGraph, StepCosts]:
    """A step with values of several sizes between its stage actions, with and without weights on the host."""
    devices, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    count = draw(st.integers(devices, 4))
    kind = draw(st.sampled_from(["gpipe", "halves", "1f1b", "roundpipe"]))
    if kind == "roundpipe":
        schedule, graph = round_robin(devices, 1, count + 1, microbatches, None, True), slot_chain(1, count + 1)
    else:
        make = one_f_one_b if kind == "1f1b" else gpipe
        schedule, graph = make(devices, count, microbatches), chain(count)
        if kind == "halves":
            schedule = schedule.halves()
    order = [step for step in graph.steps if step[0] is F]
    order += sorted(
        (step for step in graph.steps if step[0] is B), key=lambda step: step[1], reverse=kind != "roundpipe"
    )
    held = []
    reads = {step: set(sources) for step, sources in graph.reads.items()}
    for number in range(draw(st.integers(1, 6))):
        maker = draw(st.integers(0, len(order) - 2))
        readers = draw(st.sets(st.integers(maker + 1, len(order) - 1), min_size=1, max_size=3))
        size = draw(st.integers(1, 40))
        for reader in readers:
            reads[order[reader]].add(order[maker])
        held.append(Held(size, order[maker], tuple(order[each] for each in sorted(readers)), values=((number, size),)))
    weights = {stage: draw(st.integers(1, 30)) for _, stage in order}
    base = {step: {step[1]: weights[step[1]]} for step in order if step[0] is B and draw(st.booleans())}
    made = {step: sum(each.bytes for each in held if each.maker == step) for step in order}
    costs = StepCosts(
        seconds={step: draw(st.integers(1, 9)) for step in order},
        peak_bytes={step: made[step] + sum(base.get(step, {}).values()) + draw(st.integers(0, 9)) for step in order},
        held=tuple(held),
        copied_bytes={step: {step[1]: weights[step[1]]} for step in order},
        base_bytes=base,
        on_host=frozenset(weights) if kind == "roundpipe" or draw(st.booleans()) else None,
        host_bandwidth=4.0,
    )
    return schedule, dataclasses.replace(graph, reads={step: tuple(of) for step, of in reads.items()}), costs


@given(_steps(), st.integers(0, 150), st.integers(0, 2), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=500, deadline=None)
@pytest.mark.long
def test_no_order_of_workers_needs_more_than_the_predicted_peaks(
    step: tuple[Schedule, StageGraph, StepCosts], limit: int, distance: int, in_time: bool, seed: int
) -> None:
    schedule, graph, costs = step
    rule = OffloadRule(limit, distance, in_time)
    offloads = offloads_within(simulate_time(schedule, graph, costs), costs, {}, rule)
    predicted = simulate_time(schedule, graph, costs, offloads=offloads).peak_bytes
    choose = random.Random(seed)
    for _ in range(3):
        peaks = _Walk(schedule, graph, costs, offloads).peaks(choose)
        assert all(peak <= most for peak, most in zip(peaks, predicted, strict=True)), (peaks, predicted)
