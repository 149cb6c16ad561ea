"""A second simulator of time, written as plainly as can be: what tests hold the fast one against."""

from __future__ import annotations

from collections.abc import Mapping

from roundpipe_fx.schedules import Schedule, StageAction, StageGraph, StepCosts


def ends_on_paper(schedule: Schedule, graph: StageGraph, costs: StepCosts) -> dict[tuple[StageAction, int], float]:
    """When each step of each microbatch ends; what never can is absent."""
    ends: dict[tuple[StageAction, int], float] = {}
    where: dict[tuple[StageAction, int], int] = {}
    orders = [schedule.actions(device) for device in range(schedule.devices)]
    for device, order in enumerate(orders):
        where.update(((action.step, action.microbatch), device) for action in order)
    clocks = [0.0] * len(orders)
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order):
                action = order[at[device]]
                sources = [(source, action.microbatch) for source in graph.reads[action.step]]
                if any(source not in ends for source in sources):
                    break
                arrivals = [ends[s] + _travel(costs.transfer_seconds, s, action.step, where, device) for s in sources]
                start = max([clocks[device], *arrivals])
                clocks[device] = start + costs.seconds[action.step]
                ends[action.step, action.microbatch] = clocks[device]
                at[device] += 1
                moved = True
    return ends


def _travel(
    seconds: Mapping[tuple[StageAction, StageAction], float],
    source: tuple[StageAction, int],
    reader: StageAction,
    where: Mapping[tuple[StageAction, int], int],
    device: int,
) -> float:
    return seconds.get((source[0], reader), 0.0) if where[source] != device else 0.0
