"""The other plans on the frontier: memory over the step, what they save and what they recompute.

A plan keeps of them only their peaks and seconds. Their schedules are searched for again when somebody asks. Of a
pipeline they are not: each was emitted and its schedule simulated, so what is shown of them is noted then
(:mod:`roundpipe_fx.planner.alternatives`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.ir.alternative_plans import Alternative, Alternatives, AlternativeValue
from roundpipe_fx.ir.joint_graph import module_path
from roundpipe_fx.ir.source import find_line
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import SimulatedSchedule, refine, save_everything, search
from roundpipe_fx.remat.multi_call_step import search_for_step
from roundpipe_fx.remat.schedule import levels_of_schedule
from roundpipe_fx.torch_private import module_path_text

_PIECES = 800
"""Number of pieces that the curve of a plan is given in, at most."""


class PlanRecorder:
    """Plans of one graph or several as plain data; values of the same name are the same."""

    def __init__(self) -> None:
        self._plans: list[Alternative] = []
        self._values: dict[str, AlternativeValue] = {}
        self._numbers: dict[str, int] = {}

    def note(
        self, graph: OperationGraph, candidate: SimulatedSchedule, point: tuple[int, float], tiles: str = ""
    ) -> None:
        """Add a plan.

        Args:
            graph: what it was made from.
            point: its peak in bytes and its seconds, as they are told.
            tiles: what is carried out in tiles.
        """
        schedule = candidate.schedule
        levels = np.array(levels_of_schedule(graph, schedule), dtype=np.int64)
        forward = _downsample(levels[: len(graph.forward)], len(levels))
        backward = _downsample(levels[len(graph.forward) :], len(levels))
        steps = [step for _, block in schedule.backward for step in block if step.recipe is not None]
        recomputed = dict.fromkeys(storage for step in steps for storage in step.makes)
        plan = Alternative(
            bytes=point[0],
            seconds=point[1],
            curve=(*forward, *backward),
            forward=len(forward),
            saved=self._indices(graph, sorted(schedule.choice.kept)),
            recomputed=self._indices(graph, recomputed),
            tiles=tiles,
        )
        self._plans.append(plan)

    def alternatives(self, chosen: int | None = None) -> Alternatives:
        """All of them, in order.

        Args:
            chosen: index of the plan that was chosen, if it is one of them.
        """
        return Alternatives(values=tuple(self._values.values()), plans=tuple(self._plans), chosen=chosen)

    def _indices(self, graph: OperationGraph, storages: Iterable[int]) -> tuple[int, ...]:
        nodes = {
            graph.values[number].name: number for number in storages if graph.sizes[number] and number in graph.values
        }
        for name, storage in nodes.items():
            if name not in self._values:
                self._values[name] = _value(graph, storage)
        return tuple(self._numbers.setdefault(name, len(self._numbers)) for name in nodes)


def record_frontier(
    graph: OperationGraph, points: Sequence[tuple[int, float]], limit: int, own_bytes: int, own_seconds: float
) -> Alternatives:
    """The plans of a frontier.

    Args:
        graph: what they were made from.
        points: the frontier: (peak bytes, modelled seconds of recomputation).
        limit: bytes that were searched for.
        own_bytes: predicted peak of the plan that was chosen.
        own_seconds: its modelled seconds of recomputation.
    """
    candidates = _candidates(graph, points[0], limit)
    noted = PlanRecorder()
    chosen: tuple[int, int] | None = None
    count = 0
    for size, seconds in points:
        candidate = candidates.get((size, seconds))
        if candidate is None:
            continue
        # Two plans may take equally long (they differ in bytes only): the chosen one is the nearer in bytes.
        alike = math.isclose(seconds, own_seconds, rel_tol=1e-6, abs_tol=1e-12)
        if alike and (chosen is None or abs(size - own_bytes) < abs(chosen[1] - own_bytes)):
            chosen = count, size
        noted.note(graph, candidate, (size, seconds))
        count += 1
    return noted.alternatives(chosen[0] if chosen is not None else None)


def _candidates(
    graph: OperationGraph, highest: tuple[int, float], limit: int
) -> dict[tuple[int, float], SimulatedSchedule]:
    """By peak and seconds, the candidates that a planner with a limit looks at."""
    blocks = Blocks(graph)
    if graph.step is not None:
        result = search_for_step(blocks)
    else:
        kept = save_everything(blocks)
        # The planner's may count equal values once, and the search is scaled by its peak.
        if highest[1] == 0:
            kept = SimulatedSchedule(kept.schedule, dataclasses.replace(kept.peak, bytes=highest[0]))
        result = search(blocks, kept=kept)
    return {(item.peak.bytes, item.seconds): item for item in refine(blocks, result, limit)}


def _downsample(levels: np.ndarray, total: int) -> tuple[int, ...]:
    """The largest level of each of so many pieces as are this part's share of the whole."""
    # The curve has a fixed number of points whatever the number of operations, shared between forward and backward by
    # their lengths.
    count = min(len(levels), math.ceil(_PIECES * len(levels) / max(total, _PIECES)))
    return tuple(int(piece.max()) for piece in np.array_split(levels, count)) if count else ()


def _value(graph: OperationGraph, storage: int) -> AlternativeValue:
    node = graph.values[storage]
    return AlternativeValue(
        name=node.name,
        module=module_path(node, module_path_text),
        line=find_line(node),
        bytes=graph.sizes[storage],
        seconds=graph.recipes[storage].seconds if storage in graph.recipes else 0.0,
    )
