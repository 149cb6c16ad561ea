"""roundpipe_slots: forward and backward are cut into slots independently of each other, as in RoundPipe's dispatch.

Slots are counted in the order in which they run: the forward's, the fused one, the backward's.
"""

from __future__ import annotations

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition


def cut_roundpipe_slots(joint: JointGraph, partition: RoundPipePartition) -> tuple[JointGraph, list[StageCut]]:
    """Mark every computing node with its slot.

    Returns:
        the graph, and the slots in the order in which they run.
    """
    ranges = [*partition.forward, partition.fused, *partition.backward]
    cuts = [StageCut(index, first, last) for index, (first, last) in enumerate(ranges)]
    fused = len(partition.forward)
    forward = {segment: cut.index for cut in cuts[: fused + 1] for segment in range(cut.first, cut.last + 1)}
    backward = {segment: cut.index for cut in cuts[fused:] for segment in range(cut.first, cut.last + 1)}
    for node in joint.computed():
        slots = forward if node.meta[Mark.PHASE] is Phase.FORWARD else backward
        node.meta[Mark.STAGE] = slots[node.meta[Mark.SEGMENT]]
    return joint, cuts
