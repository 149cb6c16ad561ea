"""Resolved random branches: random numbers of branches whose outcome is known without them.

Such a number has no users, but later random numbers depend on its having been drawn. AOTAutograd drops values without
users, so in Dynamo's graph an operator without a result reads the number until the passes begin.
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.torch_private import resolved_random_branch

__all__ = ["keep_resolved_random_branches", "release_resolved_random_branches"]


@torch.library.custom_op("roundpipe_fx::resolved_random_branch", mutates_args=())
def _resolved_random_branch(number: torch.Tensor) -> None:
    """Reads a random number and does nothing."""


@_resolved_random_branch.register_fake
def _(number: torch.Tensor) -> None:
    return None


_RESOLVED = torch.ops.roundpipe_fx.resolved_random_branch.default
fx.node.has_side_effect(_RESOLVED)  # so that it is not dropped


def keep_resolved_random_branches(module: fx.GraphModule) -> None:
    """Make AOTAutograd keep the random numbers of resolved branches. The graph is changed in place."""
    draws = [draw for node in module.graph.nodes if (draw := resolved_random_branch(node)) is not None]
    for draw in draws:
        with module.graph.inserting_after(draw):
            module.graph.call_function(_RESOLVED, (draw,))
    if draws:
        module.recompile()


def release_resolved_random_branches(joint: JointGraph) -> JointGraph:
    """Remove the operators of :func:`keep_resolved_random_branches`; passes keep random operations without users."""
    for node in joint.graph.find_nodes(op="call_function", target=_RESOLVED):
        joint.graph.erase_node(node)
    return joint
