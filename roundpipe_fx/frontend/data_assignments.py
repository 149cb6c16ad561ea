"""Data assignments: ``buffer.data = value`` in a forward is an update of the buffer.

Dynamo traces the assignment as ``buffer.set_(value)``, which gives the buffer the memory of the value. AOTAutograd
allows this only where graphs write to their inputs, which they do not here. Where the value is new, and of the buffer's
shape, ``buffer.copy_(value)`` leaves the same numbers, in the buffer's own memory.
"""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["copy_assigned_data"]


def copy_assigned_data(module: fx.GraphModule) -> None:
    """Let inputs to whose data a new value is assigned keep their memory, in place.

    Args:
        module: Dynamo's graph.
    """
    assignments = module.graph.find_nodes(op="call_function", target=torch.Tensor.set_)
    for node in assignments:
        if len(node.args) == 2 and not node.kwargs and _is_new(node):
            node.target = _assign
    if assignments:
        module.recompile()


def _is_new(assignment: fx.Node) -> bool:
    """Whether an assigned value has memory of its own, that nothing else reads or writes."""
    old, value = assignment.args
    if not isinstance(old, fx.Node) or not isinstance(value, fx.Node) or old.op != "placeholder":
        return False
    memory, buffer = _memory(value), old.meta.get("example_value")
    # An assignment before this one returns the buffer, whose example has the value of the last one.
    others = (node for node in assignment.graph.nodes if node < assignment and node is not value)
    earlier = [_memory(node) for node in others if node.meta.get("example_value") is not buffer]
    return memory is not None and list(value.users) == [assignment] and memory not in earlier


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _assign(old: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    # Dynamo's own example of the input has become the value, so that shapes are known no sooner than here.
    if old.shape != value.shape or old.dtype != value.dtype or old.device != value.device:
        return old.set_(value)  # type: ignore[call-overload]
    return old.copy_(value)
