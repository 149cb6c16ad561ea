"""PyTorch's files of schedules: a row of comma-separated cells for each rank of ``torch.distributed.pipelining``.

A cell is the stage, a letter and the microbatch: ``2F0``. Empty cells are ticks at which a rank waits. Cells that only
move or gather data are left out on reading, since transfers are derived from the stages, and none are written:
PyTorch's runtime adds its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from roundpipe_fx.schedules.action import Action, ActionKind

_WORK = re.compile(r"(\d+)([FBIW])(\d+)$")
_MOVES = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*$")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B$")


def actions_of_cells(rows: Iterable[Sequence[str]]) -> list[list[Action]]:
    """The actions of each rank.

    A full backward of a stage whose other backwards are split becomes its two halves, one after the other. What is
    overlapped runs in the order in which it is written.

    Raises:
        ValueError: a cell is none of PyTorch's.
    """
    devices = [[action for cell in row for action in _actions(cell.strip())] for row in rows]
    halved = {action.stage for row in devices for action in row if action.kind is ActionKind.BACKWARD_WEIGHT}
    return [[part for action in row for part in _halves(action, halved)] for row in devices]


def cells_of_actions(devices: Iterable[Sequence[Action]]) -> list[list[str]]:
    """The cells of each rank, without recomputations: PyTorch's runtime has them in its backwards."""
    return [
        [f"{action.stage}{action.kind}{action.microbatch}" for action in row if action.kind is not ActionKind.RECOMPUTE]
        for row in devices
    ]


def _actions(cell: str) -> list[Action]:
    overlapped = _OVERLAPPED.match(cell)
    if overlapped is not None:
        return [action for part in overlapped[1].split(";") for action in _actions(part.strip())]
    work = _WORK.match(cell)
    if work is not None:
        return [Action(ActionKind(work[2]), int(work[1]), int(work[3]))]
    if cell and not _MOVES.match(cell):
        raise ValueError(f"{cell!r} is not an action of torch.distributed.pipelining, such as 2F0.")
    return []


def _halves(action: Action, halved: set[int]) -> list[Action]:
    if action.kind is not ActionKind.BACKWARD or action.stage not in halved:
        return [action]
    kinds = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
    return [Action(kind, action.stage, action.microbatch) for kind in kinds]
