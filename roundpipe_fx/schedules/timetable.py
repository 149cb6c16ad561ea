"""Schedules: the order in which each device runs its actions, as data, and the blocks that orders are built from.

A schedule is printed and parsed as text. It is kept as one array per device, with a row for each action: the position
of its kind in ``KINDS``, its stage and its microbatch. So orders are built and changed by operations on whole arrays.
The second of two devices under 1F1B, with four stages and two microbatches::

    run_of(1, 2, 4)                            [2, 3]
    forward = block_of(FORWARD, [2, 3], 2)     F2.0 F3.0 F2.1 F3.1
    backward = block_of(BACKWARD, [3, 2], 2)   B3.0 B2.0 B3.1 B2.1
    order = pairs(forward, backward, 2)        F2.0 F3.0 B3.0 B2.0 F2.1 F3.1 B3.1 B2.1
    its rows                                   [0, 2, 0] [0, 3, 0] [2, 3, 0] [2, 2, 0] …
    the same in schedule.halves()              F2.0 F3.0 F2.1 F3.1 B3.0 B2.0 B3.1 B2.1
"""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.schedules.action import Action, ActionKind
from roundpipe_fx.schedules.pytorch_csv import actions_of_cells, cells_of_actions
from roundpipe_fx.schedules.stage_graph import StageGraph

KINDS = (
    ActionKind.FORWARD,
    ActionKind.RECOMPUTE,
    ActionKind.BACKWARD,
    ActionKind.BACKWARD_INPUT,
    ActionKind.BACKWARD_WEIGHT,
)
NUMBER = {kind: index for index, kind in enumerate(KINDS)}


@dataclass(frozen=True, eq=False)
class Schedule:
    """An ordered list of actions for each device.

    ``print(schedule)`` shows one line per device, which :meth:`parse` reads back. Transfers are not part of it: they
    are derived from the stage graph (:func:`roundpipe_fx.schedules.with_transfers`).

    Attributes:
        name: name of the schedule.
        orders: for each device an array of shape (actions, 3): number of the kind, stage, microbatch. Compact, since a
            schedule of a thousand devices and ten thousand microbatches has twenty million actions.
        forwards_before_backwards: whether all forwards of all devices finish before any backward begins.
    """

    name: str
    orders: tuple[np.ndarray, ...]
    forwards_before_backwards: bool = False

    @classmethod
    def of(cls, name: str, devices: Iterable[Sequence[Action]]) -> Schedule:
        """Make a schedule from lists of actions.

        Args:
            name: name of the schedule.
            devices: the actions of each device, in order.

        Returns:
            the schedule.

        Raises:
            ValueError: one of the actions is a transfer.
        """
        orders = []
        for actions in devices:
            for action in actions:
                if action.kind not in NUMBER:
                    raise ValueError(f"{action} is a transfer: leave transfers out, they are derived from the stages.")
            rows = [(NUMBER[action.kind], action.stage, action.microbatch) for action in actions]
            orders.append(np.array(rows, dtype=np.int32).reshape(-1, 3))
        return cls(name, tuple(orders))

    @classmethod
    def parse(cls, text: str, name: str = "given") -> Schedule:
        """Parse a schedule.

        Args:
            text: one line per device, ``device: action action …``; the device's number is optional.
            name: name of the schedule.

        Returns:
            the schedule.

        Raises:
            ValueError: the text contains something that is not an action.
        """
        # The device's number in front of a line may be left out.
        lines = [line.split(":", 1)[-1] if line.split(":", 1)[0].strip().isdigit() else line for line in _lines(text)]
        return cls.of(name, [[Action.parse(word) for word in line.split()] for line in lines])

    @classmethod
    def from_csv(cls, path: str | os.PathLike[str], name: str = "given") -> Schedule:
        """Read a file of ``torch.distributed.pipelining``: a row for each rank, a cell for each action.

        Transfers and gathers in it are left out, since they are derived from the stages. A full backward of a stage
        whose other backwards are split is split too.

        Args:
            path: the file, as PyTorch's schedules write it, with communication or without.
            name: name of the schedule.

        Returns:
            the schedule.

        Raises:
            OSError: the file cannot be read.
            ValueError: a cell is not an action.
        """
        with open(path, newline="") as file:
            return cls.of(name, actions_of_cells(csv.reader(file)))

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write a file that a schedule of ``torch.distributed.pipelining`` reads (``format="compute_only"``).

        Recomputations are left out: there they are part of the backwards.

        Raises:
            OSError: the file cannot be written.
        """
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(cells_of_actions(map(self.actions, range(self.devices))))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.orders)

    @property
    def microbatches(self) -> int:
        """Number of microbatches."""
        return max((int(order[:, 2].max()) + 1 for order in self.orders if len(order)), default=0)

    @property
    def size(self) -> int:
        """Number of actions."""
        return sum(len(order) for order in self.orders)

    def actions(self, device: int) -> list[Action]:
        """The actions of one device, in order.

        Args:
            device: number of the device.

        Returns:
            the actions.
        """
        return [Action(KINDS[kind], stage, microbatch) for kind, stage, microbatch in self.orders[device].tolist()]

    def only(self, *kinds: ActionKind) -> Schedule:
        """A copy with the actions of some kinds only.

        Args:
            *kinds: kinds of actions to keep.

        Returns:
            the copy.
        """
        numbers = [NUMBER[kind] for kind in kinds]
        return self._where(lambda order: np.isin(order[:, 0], numbers))

    def halves(self) -> Schedule:
        """A copy with all forwards before all backwards.

        Returns:
            the copy.
        """
        forward, backward = self.only(ActionKind.FORWARD), self.only(*KINDS[1:])
        # With a barrier between them, the order within each half is all that is left to choose.
        # Pairwise concatenation keeps each device's order within the halves.
        orders = tuple(np.concatenate(pair) for pair in zip(forward.orders, backward.orders, strict=True))
        return Schedule(self.name, orders, True)

    def restricted(self, graph: StageGraph) -> Schedule:
        """A copy without the actions that are not in a stage graph.

        Returns:
            the copy.
        """
        known = [_code(kind, stage) for kind, stage in graph.steps]
        return self._where(lambda order: np.isin(_codes(order), known))

    def without_missing_halves(self, graph: StageGraph) -> Schedule:
        """A copy without halves of backwards that their stages do not have.

        A stage whose inputs need no gradients, or that has no parameters, has only the other half. Whoever writes a
        schedule for a number of stages cannot know that.

        Returns:
            the copy.
        """
        parts = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
        missing = [
            _code(kind, stage)
            for kind, other in (parts, parts[::-1])
            for kind_of_step, stage in graph.steps
            if kind_of_step is other and not graph.has(kind, stage)
        ]
        return self._where(lambda order: ~np.isin(_codes(order), missing))

    def _where(self, keep: Callable[[np.ndarray], np.ndarray]) -> Schedule:
        """A copy with the actions of each device that are to be kept."""
        return dataclasses.replace(self, orders=tuple(order[keep(order)] for order in self.orders))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.devices == other.devices
            and all(np.array_equal(mine, theirs) for mine, theirs in zip(self.orders, other.orders, strict=True))
        )

    def __hash__(self) -> int:
        return hash(tuple(order.tobytes() for order in self.orders))

    def __str__(self) -> str:
        return "\n".join(
            f"{device}: {' '.join(str(action) for action in self.actions(device))}" for device in range(self.devices)
        )


def _code(kind: ActionKind, stage: int) -> int:
    """A number for an action without its microbatch."""
    # Kind and stage in one number: stages are below 2**20, so ``np.isin`` compares both at once.
    return NUMBER[kind] << 20 | stage


def _codes(order: np.ndarray) -> np.ndarray:
    return order[:, 0] << 20 | order[:, 1]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]


def run_of(device: int, devices: int, stages: int) -> list[int]:
    """Indices of a device's consecutive stages, with the stages divided among devices as evenly as possible."""
    # 5 stages on 2 devices: device 0 has stages 0 and 1, device 1 has 2, 3 and 4.
    return list(range(device * stages // devices, (device + 1) * stages // devices))


def block_of(kind: ActionKind, stages: Sequence[int], microbatches: int, start: int = 0) -> np.ndarray:
    """Actions that run each microbatch from ``start`` on through all ``stages`` in turn; shape (actions, 3)."""
    count = max(0, microbatches - start)
    block = np.empty((count * len(stages), 3), dtype=np.int32)
    # ``stages=[0, 1]`` and 2 microbatches give the rows F0.0, F1.0, F0.1, F1.1.
    block[:, 0] = NUMBER[kind]
    block[:, 1] = np.tile(np.asarray(stages, dtype=np.int32), count)
    block[:, 2] = np.repeat(np.arange(start, start + count, dtype=np.int32), len(stages))
    return block


def pairs(first: np.ndarray, second: np.ndarray, width: int) -> np.ndarray:
    """``width`` actions of ``first`` and ``width`` actions of ``second`` in alternation; both have the same length."""
    # Rows of both are taken in turns, `width` of the first and then `width` of the second.
    both = np.stack([first.reshape(-1, width, 3), second.reshape(-1, width, 3)], axis=1)
    return both.reshape(-1, 3)
