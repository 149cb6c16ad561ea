"""Schedules: in which order each device does its actions, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.schedules.action import Action, ActionKind
from roundpipe_fx.schedules.stage_graph import StageGraph

__all__ = ["Schedule"]

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

    ``print(schedule)`` shows one line a device; :meth:`parse` reads that back. Transfers are no part of it: they follow
    from who needs what (:func:`roundpipe_fx.schedules.with_transfers`).

    Attributes:
        name: how it came about.
        orders: for each device an array of shape (actions, 3): number of the kind, stage, microbatch. Compact, since a
            schedule of a thousand devices and ten thousand microbatches has twenty million actions.
        forwards_before_backwards: whether no backward begins before all forwards of all devices are over.
    """

    name: str
    orders: tuple[np.ndarray, ...]
    forwards_before_backwards: bool = False

    @classmethod
    def of(cls, name: str, devices: Iterable[Sequence[Action]]) -> Schedule:
        """A schedule from lists of actions, one a device.

        Raises:
            ValueError: a transfer is among them.
        """
        orders = []
        for actions in devices:
            for action in actions:
                if action.kind not in NUMBER:
                    raise ValueError(f"{action}: transfers are not scheduled, they follow from who needs what.")
            rows = [(NUMBER[action.kind], action.stage, action.microbatch) for action in actions]
            orders.append(np.array(rows, dtype=np.int32).reshape(-1, 3))
        return cls(name, tuple(orders))

    @classmethod
    def parse(cls, text: str, name: str = "given") -> Schedule:
        """A schedule from its text: one line a device, ``device: action action …``; the number is optional.

        Raises:
            ValueError: something in it is no action.
        """
        lines = [line.split(":", 1)[-1] if line.split(":", 1)[0].strip().isdigit() else line for line in _lines(text)]
        return cls.of(name, [[Action.parse(word) for word in line.split()] for line in lines])

    @property
    def devices(self) -> int:
        """How many devices it is for."""
        return len(self.orders)

    @property
    def microbatches(self) -> int:
        """How many microbatches it is for."""
        return max((int(order[:, 2].max()) + 1 for order in self.orders if len(order)), default=0)

    @property
    def size(self) -> int:
        """How many actions it has."""
        return sum(len(order) for order in self.orders)

    def actions(self, device: int) -> list[Action]:
        """What one device does, in order."""
        return [Action(KINDS[kind], stage, microbatch) for kind, stage, microbatch in self.orders[device].tolist()]

    def only(self, *kinds: ActionKind) -> Schedule:
        """The same without all actions of other kinds."""
        numbers = [NUMBER[kind] for kind in kinds]
        orders = tuple(order[np.isin(order[:, 0], numbers)] for order in self.orders)
        return dataclasses.replace(self, orders=orders)

    def halves(self) -> Schedule:
        """The same, with all forwards before all backwards."""
        forward, backward = self.only(ActionKind.FORWARD), self.only(*KINDS[1:])
        orders = tuple(np.concatenate(pair) for pair in zip(forward.orders, backward.orders, strict=True))
        return Schedule(self.name, orders, True)

    def restricted(self, graph: StageGraph) -> Schedule:
        """The same without the actions whose steps are not in a graph."""
        known = np.array([NUMBER[kind] << 20 | stage for kind, stage in graph.steps], dtype=np.int32)
        keep = (np.isin(order[:, 0] << 20 | order[:, 1], known) for order in self.orders)
        return dataclasses.replace(
            self, orders=tuple(order[kept] for order, kept in zip(self.orders, keep, strict=True))
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Schedule)
            and self.devices == other.devices
            and all(np.array_equal(own, given) for own, given in zip(self.orders, other.orders, strict=True))
        )

    def __hash__(self) -> int:
        return hash(tuple(order.tobytes() for order in self.orders))

    def __str__(self) -> str:
        return "\n".join(
            f"{device}: {' '.join(str(action) for action in self.actions(device))}" for device in range(self.devices)
        )


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
