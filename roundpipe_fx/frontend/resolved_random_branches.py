"""Settled draws: random numbers that a branch was to depend on, and whose branch was known without them.

Nothing reads such a number, but what is drawn after it depends on its having been drawn. AOTAutograd drops what nothing
reads, so in Dynamo's graph an operator without a result reads it until the passes begin.
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
fx.node.has_side_effect(_RESOLVED)  # it is there not to be dropped


def keep_resolved_random_branches(module: fx.GraphModule) -> None:
    """Let AOTAutograd keep what was drawn for branches that were known."""
    draws = [draw for node in module.graph.nodes if (draw := resolved_random_branch(node)) is not None]
    for draw in draws:
        with module.graph.inserting_after(draw):
            module.graph.call_function(_RESOLVED, (draw,))
    if draws:
        module.recompile()


def release_resolved_random_branches(joint: JointGraph) -> JointGraph:
    """Drop the readers; from here on draws stay by themselves."""
    for node in joint.graph.find_nodes(op="call_function", target=_RESOLVED):
        joint.graph.erase_node(node)
    return joint
