"""Resolved random branches: random numbers of branches whose outcome is known without them.

Such a number has no users, but later random numbers depend on its having been drawn. AOTAutograd drops values without
users, so in Dynamo's graph an operator without a result reads the number until the passes begin. Models with layer drop
need it (:mod:`roundpipe_fx.passes.resolved_random_branches`).
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.torch_private import resolved_random_branch


@torch.library.custom_op("roundpipe_fx::resolved_random_branch", mutates_args=())
def _resolved_random_branch(number: torch.Tensor) -> None:
    """Reads a random number and does nothing."""


@_resolved_random_branch.register_fake
def _(number: torch.Tensor) -> None:
    return None


RESOLVED_RANDOM_BRANCH = torch.ops.roundpipe_fx.resolved_random_branch.default
fx.node.has_side_effect(RESOLVED_RANDOM_BRANCH)  # it is there not to be dropped


def keep_resolved_random_branches(module: fx.GraphModule) -> None:
    """Make AOTAutograd keep the random numbers of resolved branches. The graph is changed in place."""
    draws = [draw for node in module.graph.nodes if (draw := resolved_random_branch(node)) is not None]
    for draw in draws:
        with module.graph.inserting_after(draw):
            module.graph.call_function(RESOLVED_RANDOM_BRANCH, (draw,))
    if draws:
        module.recompile()
