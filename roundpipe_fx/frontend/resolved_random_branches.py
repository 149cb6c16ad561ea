"""Resolved random branches: random numbers of branches whose outcome is known without them.

Such a number has no users, but later random numbers depend on its having been drawn. AOTAutograd drops values without
users, so in Dynamo's graph an operator without a result reads the number until the passes begin. Models with layer drop
need it (:mod:`roundpipe_fx.passes.resolved_random_branches`).
"""

from __future__ import annotations

from torch import fx

from roundpipe_fx.ir.random_branches import RESOLVED_RANDOM_BRANCH
from roundpipe_fx.torch_private import resolved_random_branch

__all__ = ["keep_resolved_random_branches"]


def keep_resolved_random_branches(module: fx.GraphModule) -> None:
    """Make AOTAutograd keep the random numbers of resolved branches. The graph is changed in place."""
    draws = [draw for node in module.graph.nodes if (draw := resolved_random_branch(node)) is not None]
    for draw in draws:
        with module.graph.inserting_after(draw):
            module.graph.call_function(RESOLVED_RANDOM_BRANCH, (draw,))
    if draws:
        module.recompile()
