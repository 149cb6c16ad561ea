"""The stage graph: which step needs the results of which, of its own microbatch or of the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundpipe_fx.schedules.action import ActionKind, StageAction

__all__ = ["StageGraph", "chain", "rounds"]


@dataclass(frozen=True)
class StageGraph:
    """What there is to do for a microbatch.

    Attributes:
        reads: for each step those whose results it reads.
        carried: for each step those whose results for the microbatch before it reads: statistics that each microbatch
            updates.
    """

    reads: Mapping[StageAction, tuple[StageAction, ...]]
    carried: Mapping[StageAction, tuple[StageAction, ...]] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[StageAction, ...]:
        """All steps."""
        return tuple(self.reads)

    def has(self, kind: ActionKind, stage: int) -> bool:
        """Whether there is such a step."""
        return (kind, stage) in self.reads


def chain(stages: int, *, split: bool = False, recompute: bool = False, training: bool = True) -> StageGraph:
    """The graph of a pipeline in which each stage reads the one before.

    Args:
        stages: how many.
        split: whether the gradients of inputs and of parameters are made in steps of their own.
        recompute: whether stages have a recomputation.
        training: whether there is a backward.
    """
    reads: dict[StageAction, tuple[StageAction, ...]] = {}
    for stage in range(stages):
        reads[ActionKind.FORWARD, stage] = ((ActionKind.FORWARD, stage - 1),) if stage else ()
    if not training:
        return StageGraph(reads)
    backward = ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD
    for stage in range(stages):
        sources: list[StageAction] = [(ActionKind.FORWARD, stage)]
        if recompute:
            reads[ActionKind.RECOMPUTE, stage] = ((ActionKind.FORWARD, stage),)
            sources.append((ActionKind.RECOMPUTE, stage))
        if stage + 1 < stages:
            sources.append((backward, stage + 1))
        reads[backward, stage] = tuple(sources)
        if split:
            reads[ActionKind.BACKWARD_WEIGHT, stage] = ((backward, stage),)
    return StageGraph(reads)


def rounds(fused: int, slots: int, *, recompute: bool = False) -> StageGraph:
    """The graph of RoundPipe's dispatch: forward slots up to ``fused``, backward slots from there on.

    Args:
        fused: the slot that runs the forward's end and the backward's beginning.
        slots: how many there are.
        recompute: whether the backward slots after the fused one have a recomputation.
    """
    reads: dict[StageAction, tuple[StageAction, ...]] = {}
    for slot in range(fused + 1):
        reads[ActionKind.FORWARD, slot] = ((ActionKind.FORWARD, slot - 1),) if slot else ()
    reads[ActionKind.BACKWARD, fused] = ((ActionKind.FORWARD, fused),)
    for slot in range(fused + 1, slots):
        sources: list[StageAction] = [(ActionKind.BACKWARD, slot - 1)]
        if recompute:
            reads[ActionKind.RECOMPUTE, slot] = ()
            sources.append((ActionKind.RECOMPUTE, slot))
        reads[ActionKind.BACKWARD, slot] = tuple(sources)
    return StageGraph(reads)
