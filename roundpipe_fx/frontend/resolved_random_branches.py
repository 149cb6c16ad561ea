"""Settled draws: random numbers that a branch was to depend on, and whose branch was known without them.

Nothing reads such a number, but what is drawn after it depends on its having been drawn. AOTAutograd drops what nothing
reads, so in Dynamo's graph an operator without a result reads it until the passes begin.
"""

from __future__ import annotations

from torch import fx

from roundpipe_fx.ir.random_branches import SETTLED_DRAW
from roundpipe_fx.torch_private import resolved_random_branch

__all__ = ["keep_resolved_random_branches"]


def keep_resolved_random_branches(module: fx.GraphModule) -> None:
    """Let AOTAutograd keep what was drawn for branches that were known."""
    draws = [draw for node in module.graph.nodes if (draw := resolved_random_branch(node)) is not None]
    for draw in draws:
        with module.graph.inserting_after(draw):
            module.graph.call_function(SETTLED_DRAW, (draw,))
    if draws:
        module.recompile()
