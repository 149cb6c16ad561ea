"""Transfers: sends and receives, derived from which stage action reads which.

After an action, its results are sent directly to every device that runs a reader of them, whatever its stage; so values
that skip stages are sent once, and not through the stages between. A device receives just before its first reader runs.
"""

from __future__ import annotations

from roundpipe_fx.schedules.action import Action, ActionKind, StageAction
from roundpipe_fx.schedules.schedule import Schedule
from roundpipe_fx.schedules.stage_graph import StageGraph

__all__ = ["with_transfers"]


def with_transfers(schedule: Schedule, graph: StageGraph) -> list[list[Action]]:
    """Each device's actions, with sends and receives inserted.

    Args:
        schedule: a valid schedule.
        graph: which stage action reads which.
    """
    orders = [schedule.actions(device) for device in range(schedule.devices)]
    where = {(action.step, action.microbatch): device for device, order in enumerate(orders) for action in order}
    readers: dict[StageAction, list[StageAction]] = {}
    for step, sources in graph.reads.items():
        for source in sources:
            readers.setdefault(source, []).append(step)
    full = []
    for device, order in enumerate(orders):
        actions: list[Action] = []
        received: set[tuple[StageAction, int]] = set()
        for action in order:
            batch = action.microbatch
            for source in graph.reads[action.step]:
                peer = where.get((source, batch), device)
                if peer != device and (source, batch) not in received:
                    received.add((source, batch))
                    actions.append(Action(ActionKind.RECEIVE, source[1], batch, source[0], peer))
            actions.append(action)
            peers = {where.get((reader, batch), device) for reader in readers.get(action.step, ())} - {device}
            actions += [Action(ActionKind.SEND, action.stage, batch, action.kind, peer) for peer in sorted(peers)]
        full.append(actions)
    return full
