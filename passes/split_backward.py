"""split_backward: separates the gradients of inputs from the gradients of parameters.

Another stage waits for the gradients of a stage's inputs; none waits for those of its parameters. Each stage's backward
is divided: operations that lead to the backward of an earlier stage stay, the others get a separate phase and can be
delayed until the device would idle (Qi et al., "Zero bubble pipeline parallelism", 2024). The stage with which the
backward ends has no earlier stage; there, operations that lead to an earlier segment stay.

Seeded operations and those with side effects stay where they are.
"""

from __future__ import annotations

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, has_side_effect, is_seeded


def split_backward(joint: JointGraph) -> JointGraph:
    """Give phase weight to nodes of the backward that lead only to gradients of parameters.

    Args:
        joint: a graph whose recomputation has been decided.
    """
    backward = joint.in_phase(Phase.BACKWARD)
    last_to_run = min((node.meta[Mark.STAGE] for node in backward), default=0)
    waited_for = {node for node in backward if is_seeded(node) or has_side_effect(node)}
    for node in reversed(backward):
        for user in node.users:
            if user.op == "output" or user.meta.get(Mark.PHASE) is not Phase.BACKWARD:
                continue
            stage, segment = node.meta[Mark.STAGE], node.meta[Mark.SEGMENT]
            earlier_stage = user.meta[Mark.STAGE] != stage
            earlier_segment = stage == last_to_run and user.meta[Mark.SEGMENT] < segment
            if user in waited_for or earlier_stage or earlier_segment:
                waited_for.add(node)
    for node in backward:
        if node not in waited_for:
            node.meta[Mark.PHASE] = Phase.WEIGHT
    return joint
