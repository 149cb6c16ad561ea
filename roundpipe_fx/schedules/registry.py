"""The schedules that are known by name. Users may add their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping

from roundpipe_fx.schedules.dualpipev import DUALPIPEV
from roundpipe_fx.schedules.gpipe import GPIPE
from roundpipe_fx.schedules.interleaved import INTERLEAVED
from roundpipe_fx.schedules.one_f_one_b import ONE_F_ONE_B
from roundpipe_fx.schedules.round_robin import ROUNDPIPE
from roundpipe_fx.schedules.spec import ScheduleSpec
from roundpipe_fx.schedules.zbv import ZBV
from roundpipe_fx.schedules.zero_bubble import ZERO_BUBBLE


class _Schedules(MutableMapping[str, ScheduleSpec]):
    """Specifications by their names, in the order in which they are listed and tried."""

    def __init__(self, specs: Iterable[ScheduleSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}

    def __getitem__(self, name: str) -> ScheduleSpec:
        return self._specs[name]

    def __setitem__(self, name: str, spec: ScheduleSpec) -> None:
        if not isinstance(spec, ScheduleSpec):
            raise TypeError(f"SCHEDULES[{name!r}] must be a ScheduleSpec, not {type(spec).__name__}.")
        if name != spec.name:
            raise ValueError(f"SCHEDULES[{name!r}]: the specification has the name {spec.name!r}. Use it as the key.")
        self._specs[name] = spec

    def __delitem__(self, name: str) -> None:
        del self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def __repr__(self) -> str:
        return f"SCHEDULES({', '.join(self._specs)})"


SCHEDULES: MutableMapping[str, ScheduleSpec] = _Schedules(
    [GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZBV, DUALPIPEV, ROUNDPIPE]
)
"""All schedules by name: the values of the option ``schedule``, beside ``"auto"`` and a schedule of one's own."""


def default_schedule(offloaded: bool, training: bool) -> ScheduleSpec:
    """The schedule where the user names none, and whenever nothing is trained: then there is nothing to interleave.

    Args:
        offloaded: whether the model lies on the host.
        training: whether there is a backward.
    """
    if offloaded:
        return ROUNDPIPE
    return ONE_F_ONE_B if training else GPIPE


def schedules_table() -> str:
    """The schedules as a Markdown table."""
    rows = ["| schedule | |", "|---|---|", *(f"| `{spec.name}` | {spec.about} |" for spec in SCHEDULES.values())]
    return "\n".join([*rows, "| `auto` | the one with the shortest simulated step within the budget |"]) + "\n"
