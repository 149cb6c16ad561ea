"""The stage graph: which stage action reads the results of which, for its own microbatch or the previous one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roundpipe_fx.schedules.action import ActionKind, StageAction


@dataclass(frozen=True)
class StageGraph:
    """The stage actions of one microbatch and their dependencies.

    Attributes:
        reads: for each stage action, those whose results it reads.
        carried: for each stage action, those whose results for the previous microbatch it reads, such as buffers that
            each microbatch updates.
    """

    reads: Mapping[StageAction, tuple[StageAction, ...]]
    carried: Mapping[StageAction, tuple[StageAction, ...]] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[StageAction, ...]:
        """All stage actions."""
        return tuple(self.reads)

    def has(self, kind: ActionKind, stage: int) -> bool:
        """Return whether the graph has a stage action."""
        return (kind, stage) in self.reads


def chain(stages: int, *, split: bool = False, recompute: bool = False, training: bool = True) -> StageGraph:
    """The graph of a pipeline in which each stage reads the previous one.

    Args:
        split: whether gradients of inputs and of parameters are separate stage actions.
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


def slot_chain(fused: int, slots: int, *, recompute: bool = False) -> StageGraph:
    """The graph of RoundPipe's dispatch: forward slots up to ``fused``, backward slots from there on.

    Args:
        fused: index of the slot that runs the end of the forward and the beginning of the backward.
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
