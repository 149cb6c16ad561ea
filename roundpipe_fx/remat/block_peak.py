"""The peak of a block's steps in any sequence.

Hundreds of sequences are tried for a block. So no events are made for each, and no copies are numbered: what a step
reads is the latest copy, so a storage's copy dies where the next one is made, or where it is read for the last time
before. The peak is that of :func:`roundpipe_fx.analysis.liveness.find_peak`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from roundpipe_fx.analysis.operations import OperationGraph, PlannedOp
from roundpipe_fx.analysis.recomputation import Form


class BlockPeak:
    """Called with positions of steps, in which one that runs twice is listed twice, it returns the most bytes alive.

    Args:
        steps: of the block. All run in the same reuse scope.
        before: storages that are alive when the first step runs.
        lasting: storages that live to the end.
    """

    def __init__(
        self, graph: OperationGraph, steps: Sequence[PlannedOp], before: Collection[int], lasting: Collection[int]
    ) -> None:
        # Storages of other segments are the same in every sequence of the block, so they cancel.
        counted = set(before).union(*(step.makes for step in steps))
        self._sizes = graph.sizes
        self._before = frozenset(before)
        self._lasting = frozenset(lasting) & counted
        self._reads = [tuple(counted.intersection(step.reads)) for step in steps]
        self._makes = [step.makes for step in steps]
        self._made_bytes = [sum(graph.sizes[storage] for storage in step.makes) for step in steps]
        self._candidates = [_inplace_candidates(step) for step in steps]
        self._workspaces = [
            step.operation.workspace if step.recipe is None else step.recipe.workspace for step in steps
        ]

    def __call__(self, sequence: Sequence[int], most: int | None = None) -> int:
        """The peak in bytes; some number above ``most`` if it is above that."""
        sizes, makes = self._sizes, self._makes
        alive = set(self._lasting)
        # Two passes. The first one, from the end, finds where each copy dies; the second one, from the beginning, adds
        # up.
        dying: list[list[int]] = []
        # Backwards, the first reader that is met is the last one to run: there a copy dies. Made, it is another copy.
        for step in reversed(sequence):
            dies = []
            for storage in makes[step]:
                if storage in alive:
                    alive.remove(storage)
                else:
                    dies.append(storage)
            for storage in self._reads[step]:
                if storage not in alive:
                    alive.add(storage)
                    dies.append(storage)
            dying.append(dies)
        dying.reverse()
        peak = live = sum(sizes[storage] for storage in self._before & alive)
        allocated: set[int] = set()
        for step, dies in zip(sequence, dying, strict=True):
            live += self._made_bytes[step]
            allocated.update(makes[step])
            during = live + self._workspaces[step]
            # The result is written over the first operand that dies here: both are not alive at one time.
            for storage in self._candidates[step]:
                if storage in dies and storage in allocated:
                    during -= sizes[storage]
                    break
            if during > peak:
                peak = during
                # The caller has a lower one already.
                if most is not None and peak > most:
                    break
            for storage in dies:
                live -= sizes[storage]
        return peak


def _inplace_candidates(step: PlannedOp) -> tuple[int, ...]:
    is_same = step.recipe is None or step.recipe.form is Form.SAME
    return step.operation.inplace_candidates if is_same else ()
