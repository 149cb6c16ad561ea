"""Settled draws: random numbers that a branch was to depend on, and whose branch was known without them.

Nothing reads such a number, but what is drawn after it depends on its having been drawn. AOTAutograd drops what nothing
reads, so in Dynamo's graph an operator without a result reads it until the passes begin.
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.torch_private import settled_draw

__all__ = ["keep_settled_draws", "release_settled_draws"]


@torch.library.custom_op("roundpipe_fx::settled_draw", mutates_args=())
def _settled_draw(number: torch.Tensor) -> None:
    """Reads a random number and does nothing."""


@_settled_draw.register_fake
def _(number: torch.Tensor) -> None:
    return None


_SETTLED = torch.ops.roundpipe_fx.settled_draw.default
fx.node.has_side_effect(_SETTLED)  # it is there not to be dropped


def keep_settled_draws(module: fx.GraphModule) -> None:
    """Let AOTAutograd keep what was drawn for branches that were known."""
    draws = [draw for node in module.graph.nodes if (draw := settled_draw(node)) is not None]
    for draw in draws:
        with module.graph.inserting_after(draw):
            module.graph.call_function(_SETTLED, (draw,))
    if draws:
        module.recompile()


def release_settled_draws(joint: JointGraph) -> JointGraph:
    """Drop the readers; from here on draws stay by themselves."""
    for node in joint.graph.find_nodes(op="call_function", target=_SETTLED):
        joint.graph.erase_node(node)
    return joint
