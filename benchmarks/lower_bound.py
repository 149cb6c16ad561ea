"""A lower bound of peak memory: no schedule of these operations goes below it, whatever it recomputes.

The schedules that are meant run every operation of the backward once, and those of the forward as often as they like,
whole operations at a time. When an operation of the backward runs, there live at least its operands and its result,
what the caller holds, and of the backward's storages a minimum over all that may have run by then: what has run is
closed under "needs", so the minimum is a minimum cut (Picard, "Maximal closure of a graph and applications to
combinatorial problems", 1976). Before that one of its operands was the last to be made; then the others lived already,
beside what making it took. The bound is the largest of these over all operations of the backward.

Forward storages are taken to be free but where an operation reads or makes them, so the bound need not be reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from roundpipe_fx.analysis.minimum_cut import SINK, SOURCE, UNCUTTABLE, Arc, choose_unit, minimum_cut
from roundpipe_fx.analysis.operations import Operation, OperationGraph

__all__ = ["LowerBound", "lower_bound"]


@dataclass(frozen=True)
class LowerBound:
    """Bytes that a step needs at the least, and where.

    Attributes:
        bytes: how many.
        operation: of the backward: while it runs, or while one of its operands is made; ``None``: in the forward.
    """

    bytes: int
    operation: Operation | None


def lower_bound(graph: OperationGraph) -> LowerBound:
    """The bound for a graph: a few minimum cuts for each operation of the backward."""
    cut = _Cut(graph)
    best = LowerBound(max(map(cut.while_first_run, graph.forward), default=0), None)
    for operation in cut.backward:
        least = max(cut.while_running(operation), cut.while_operands_are_made(operation))
        if least > best.bytes:
            best = LowerBound(least, operation)
    return best


def _bytes(graph: OperationGraph, storages: Iterable[int]) -> int:
    return sum(graph.sizes[storage] for storage in storages)


class _Cut:
    """The network in which a cut says what of the backward has run: it is on the source's side."""

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        self.backward = [operation for block in graph.backward.values() for operation in block]
        self._makers = {storage: operation for operation in self.backward for storage in operation.makes}
        self._vertices = {operation: 2 + i for i, operation in enumerate(self.backward)}
        self._unit = choose_unit(graph.sizes)
        self._held = graph.outputs | graph.held
        """What the caller holds as long as any of the backward runs."""
        self._arcs: list[Arc] = []
        readers: dict[int, list[Operation]] = {}
        for operation in self.backward:
            for storage in operation.reads:
                readers.setdefault(storage, []).append(operation)
                if storage in self._makers:
                    self._arcs.append((self._vertices[operation], self._vertices[self._makers[storage]], UNCUTTABLE))
        numbers = itertools.count(2 + len(self.backward))
        for storage in (*self._makers, *(graph.must_save & readers.keys())):
            if storage in self._held:
                continue
            size = graph.sizes[storage] // self._unit
            maker = self._vertices[self._makers[storage]] if storage in self._makers else SOURCE
            if storage in graph.gradients:
                self._arcs.append((maker, SINK, size))
            elif storage in readers:
                alive = next(numbers)  # on the sink's side unless all that read the storage have run
                self._arcs.append((maker, alive, size))
                self._arcs += [(alive, self._vertices[reader], UNCUTTABLE) for reader in readers[storage]]
        self._count = next(numbers)

    def while_first_run(self, operation: Operation) -> int:
        """Bytes that live at the least while an operation of the forward runs."""
        beside = {*operation.reads, *operation.makes}
        return _bytes(self.graph, beside) + operation.workspace - self._written_over(operation)

    def while_running(self, operation: Operation) -> int:
        """Bytes that live at the least while an operation of the backward runs."""
        has_run = [self._makers[storage] for storage in operation.reads if storage in self._makers]
        beside = self._forward(operation.reads) | set(operation.makes)
        own = _bytes(self.graph, beside) + operation.workspace - self._written_over(operation)
        return self._live(has_run, operation) + own

    def while_operands_are_made(self, operation: Operation) -> int:
        """Bytes that live at the least at some time before it runs: when the last of its operands is made."""
        makers = [self._makers[storage] for storage in operation.reads if storage in self._makers]
        if not makers:
            return 0  # all may have been made in the forward
        forward = self._forward(operation.reads)
        found = [self._while_made_again(operation, storage, forward, makers) for storage in forward]
        for last in makers:
            others = [maker for maker in makers if maker is not last]
            if not any(self._needs(other, last) for other in others):
                needed = [self._makers[storage] for storage in last.reads if storage in self._makers]
                beside = forward | self._forward(last.reads) | set(last.makes)
                live = self._live([*others, *needed], last)
                found.append(live + _bytes(self.graph, beside) + last.workspace - self._written_over(last))
        return min(found)

    def _while_made_again(self, operation: Operation, storage: int, forward: set[int], makers: list[Operation]) -> int:
        """Bytes while a forward operand is made, if it is the last of an operation's operands."""
        recipes = [
            recipe for table in (self.graph.recipes, self.graph.mask_only) if (recipe := table.get(storage)) is not None
        ]
        live = self._live(makers, operation)
        return live + min(
            _bytes(self.graph, (forward | self._forward(recipe.reads) | set(recipe.makes)) - self._held)
            + recipe.workspace
            - self._written_over(recipe.operation)
            for recipe in recipes
        )

    def _needs(self, operation: Operation, other: Operation) -> bool:
        """Whether an operation runs after another in any order."""
        pending, seen = [operation], {operation}
        while pending:
            for storage in pending.pop().reads:
                maker = self._makers.get(storage)
                if maker is not None and maker not in seen:
                    seen.add(maker)
                    pending.append(maker)
        return other in seen

    def _forward(self, storages: Iterable[int]) -> set[int]:
        """Those of the forward that are not counted wherever anything of the backward runs."""
        graph = self.graph
        found = {storage for storage in storages if graph.is_forward(storage)}
        return found - self._held - graph.must_save

    def _written_over(self, operation: Operation) -> int:
        return max((self.graph.sizes[storage] for storage in operation.inplace_candidates), default=0)

    def _live(self, has_run: Iterable[Operation], running: Operation) -> int:
        """Bytes of the backward's storages, of those that are kept in any case, and of what the caller holds."""
        arcs = [*self._arcs, (self._vertices[running], SINK, UNCUTTABLE)]
        arcs += [(SOURCE, self._vertices[operation], UNCUTTABLE) for operation in has_run]
        flow, _ = minimum_cut(arcs, self._count)
        return flow * self._unit + _bytes(self.graph, self._held)
