"""What ``plan.explain(…)`` says: what happens to a value, or to all values of a module."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from roundpipe_fx.ir.decisions import LISTS, Decisions, PlannedTiles, PlannedValue
from roundpipe_fx.report.plan_text import tiles_explained, value_explained

__all__ = ["explained"]


def explained(plan: Decisions, name: str) -> str:
    """The explanation, a line for each value.

    Args:
        plan: any.
        name: name of a value in the emitted code, or of a module.

    Raises:
        ValueError: there is no such value or module; the message lists close matches.
    """
    fates = list(_fates(plan))
    matching = [fate for fate in fates if fate[2].name == name]
    tiled = [tiles for tiles in plan.tiles if tiles.name == name]
    if not matching and not tiled:
        matching = [fate for fate in fates if fate[2].module == name or fate[2].module.startswith(f"{name}.")]
        tiled = [loop for loop in plan.tiles if loop.module == name or loop.module.startswith(f"{name}.")]
    if not matching and not tiled:
        values: list[PlannedValue | PlannedTiles] = [*(fate[2] for fate in fates), *plan.tiles]
        names = {value.name for value in values} | {value.module for value in values}
        close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4)
        hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"no value and no module named {name!r} in this plan.{hint}")
    texts = [value_explained(stage, fate, value) + _offloaded(plan, value.name) for stage, fate, value in matching]
    return "\n".join([*texts, *map(tiles_explained, tiled)])


def _offloaded(plan: Decisions, name: str) -> str:
    """What is added to the explanation of a value that leaves its device."""
    if name in plan.on_host:
        return "; on the host from the forward to the backward"
    for value in plan.pipeline.offloaded if plan.pipeline is not None else ():
        if value.name == name:
            count = plan.pipeline.microbatches if plan.pipeline is not None else 0
            return f"; offloaded: it leaves for the host and comes back in {value.microbatches} of {count} microbatches"
    return ""


def _fates(plan: Decisions) -> Iterator[tuple[int, str, PlannedValue]]:
    for stage in plan.stages:
        replayed = {value.name for value in stage.replayed}
        for fate in LISTS:
            for value in getattr(stage, fate):
                if fate == "replayed" or value.name not in replayed:
                    yield stage.index, fate, value
