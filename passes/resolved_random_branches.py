"""resolved_random_branches: what was drawn for a branch that is known without it stays, by itself.

From Dynamo's graph on an operator without a result reads such a number, so that AOTAutograd keeps it. Passes never
drop what draws random numbers, so the reader goes here.
"""

from __future__ import annotations

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.random_branches import RESOLVED_RANDOM_BRANCH

__all__ = ["release_resolved_random_branches"]


def release_resolved_random_branches(joint: JointGraph) -> JointGraph:
    """Drop the readers; from here on draws stay by themselves."""
    for node in joint.graph.find_nodes(op="call_function", target=RESOLVED_RANDOM_BRANCH):
        joint.graph.erase_node(node)
    return joint
