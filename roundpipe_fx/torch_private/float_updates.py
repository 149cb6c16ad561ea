"""Updates of numbers in float64: Dynamo drops them, and here it does not.

A graph that reads a float64 tensor of no dimensions on the CPU is traced twice: AOTAutograd finds that the number is no
argument of Python's, and asks Dynamo to begin again and leave it out where only ``item`` reads it
(``OutputGraph.remove_tensorify_specialized_graphargs``). Dynamo then removes whatever node stands for that tensor and
has no reader that is not ``item``, and that is more than the input: the result of ``counter.add_(1)`` is the counter
too, and mostly has no reader at all. So the update is lost, and the counter keeps its value (torch 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["keep_float_updates"]


def keep_float_updates(active: Callable[[], bool]) -> None:
    """Let Dynamo remove inputs there, and no operations.

    Args:
        active: whether what this thread traces is ours.
    """
    from torch._dynamo.output_graph import OutputGraph

    remove = OutputGraph.remove_tensorify_specialized_graphargs
    if getattr(remove, "_keeps_updates", False):
        return

    @functools.wraps(remove)
    def remove_inputs_alone(self: Any) -> None:
        if not active():
            return remove(self)
        # It looks at what nodes stand for, so for the time being operations stand for nothing.
        stood_for = {
            node: node.meta.pop("example_value")
            for node in self.graph.nodes
            if node.op != "placeholder" and "example_value" in node.meta
        }
        try:
            return remove(self)
        finally:
            for node, value in stood_for.items():
                node.meta["example_value"] = value

    remove_inputs_alone._keeps_updates = True  # type: ignore[attr-defined]
    OutputGraph.remove_tensorify_specialized_graphargs = remove_inputs_alone  # type: ignore[method-assign]
