"""Updates of float64 scalars, which Dynamo drops (torch 2.13), are kept.

A graph that reads a zero-dimensional float64 tensor on the CPU is traced twice: AOTAutograd finds that the tensor is
not a Python number, and makes Dynamo start again and remove it where only ``item`` reads it
(``OutputGraph.remove_tensorify_specialized_graphargs``). Dynamo then removes every node whose value is that tensor and
that has no reader other than ``item``. This is more than the input: the value of ``counter.add_(1)`` is the counter
too, and often has no reader at all. So the update is lost, and the counter keeps its value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["keep_float_updates"]


def keep_float_updates(active: Callable[[], bool]) -> None:
    """Patch Dynamo so that it removes inputs only, and no operations.

    Args:
        active: whether the current thread traces one of our compilations.
    """
    from torch._dynamo.output_graph import OutputGraph

    remove = OutputGraph.remove_tensorify_specialized_graphargs
    if getattr(remove, "roundpipe_fx", False):
        return

    @functools.wraps(remove)
    def remove_inputs_alone(self: Any) -> None:
        if not active():
            return remove(self)
        # It compares the example values of nodes, so these are removed from operations for the time being.
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

    remove_inputs_alone.roundpipe_fx = True  # type: ignore[attr-defined]
    OutputGraph.remove_tensorify_specialized_graphargs = remove_inputs_alone  # type: ignore[method-assign]
