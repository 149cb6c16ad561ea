"""Overlap: recomputation beside the gradient before it, if kernels of either do not fill the device.

A kernel counts as filling the device if its result has at least ``full`` elements. If kernels that do not take half of
the modelled seconds of either part, the recomputation runs on a second stream::

    main stream    [ backward of stage 2 ]┐           ┌[ backward of stage 1 ]
    side stream    [ recompute stage 1 ]  └── waits ──┘
"""

from __future__ import annotations

import itertools
from collections import Counter

from torch import fx

from roundpipe_fx.codegen import Program
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, tensor_values
from roundpipe_fx.torch_private import size_hint


class UnfilledFractions:
    """The share of the modelled seconds of parts of a graph that kernels take which do not fill the device.

    Args:
        full: elements of a result from which on a kernel fills the device.
    """

    def __init__(self, full: int) -> None:
        self._full = full
        self._seconds: Counter[tuple[int, Phase]] = Counter()
        self._small: Counter[tuple[int, Phase]] = Counter()

    def add(self, part: tuple[int, Phase], node: fx.Node) -> None:
        """Count a node."""
        seconds = node.meta[Mark.SECONDS]
        self._seconds[part] += seconds
        # A result of fewer elements than the device has threads leaves part of it idle.
        if seconds and sum(size_hint(value.numel()) for value in tensor_values(node)) < self._full:
            self._small[part] += seconds

    def overlap_pays(self, *parts: tuple[int, Phase]) -> bool:
        """Return whether one of these parts leaves enough of the device idle for another to overlap with it."""
        # Half of the time without a full device: another part may run beside it.
        return any(self._small[part] >= self._seconds[part] / 2 for part in parts)


def stages_to_overlap(joint: JointGraph, full: int) -> set[int]:
    """Find the stages whose recomputation should overlap with the preceding backward.

    Args:
        joint: a graph with stages.
        full: elements of a result from which on a kernel fills the device.
    """
    unfilled = UnfilledFractions(full)
    for node in joint.computed():
        unfilled.add((node.meta[Mark.STAGE], node.meta[Mark.PHASE]), node)
    stages = sorted({node.meta[Mark.STAGE] for node in joint.in_phase(Phase.BACKWARD)}, reverse=True)
    return {
        stage
        for before, stage in itertools.pairwise(stages)
        if unfilled.overlap_pays((before, Phase.BACKWARD), (stage, Phase.FORWARD))
    }


def modules_to_overlap(joint: JointGraph, backward: Program, unfilled: UnfilledFractions) -> set[str]:
    """Names of the recompute modules that gain by running beside the module that is called before them."""
    recomputing = {node.meta[Mark.STAGE] for node in joint.in_phase(Phase.RECOMPUTE) if Mark.ORIGIN in node.meta}
    return {
        call.name
        for before, call in itertools.pairwise(backward.calls)
        if call.phase is Phase.RECOMPUTE
        and call.stage in recomputing
        and unfilled.overlap_pays((before.stage, before.phase), (call.stage, call.phase))
    }
