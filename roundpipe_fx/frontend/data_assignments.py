"""Data assignments: ``buffer.data = value`` in a forward is an update of the buffer.

Dynamo traces the assignment as ``buffer.set_(value)``, and from PyTorch 2.15 on as ``shallow_copy_data_``, which give
the buffer the memory of the value. AOTAutograd allows this only where graphs write to their inputs, which they do not
here. Where the value is new, and of the buffer's shape, ``buffer.copy_(value)`` leaves the same numbers, in the
buffer's own memory. Anything else is an error::

    self.mean.data = 0.9 * self.mean + 0.1 * x.mean(0)    mean.copy_(…): nothing else reads the new value
    self.mean.data = x[0]                                 an error: the buffer would share the memory of x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.source import find_source
from roundpipe_fx.torch_private import PassedThrough, unseen_by_autograd


class DataAssignmentError(PassedThrough, ValueError):
    """A forward gives a buffer or a parameter memory that something else has too, or data of another kind."""


def copy_assigned_data(module: fx.GraphModule) -> None:
    """Let inputs to whose data a new value is assigned keep their memory, in place.

    Raises:
        DataAssignmentError: the value shares its memory. Where it has another shape, dtype or device than the input,
            the error comes when the graph is traced.
    """
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assignments = [node for node in calls if node.target in _ASSIGNMENTS]
    for node in assignments:
        source = find_source(node)
        if len(node.args) != 2 or node.kwargs or not _is_new(node):
            raise _make_error("whose memory something else reads or writes", source)
        node.target, node.args = _ASSIGNMENTS[node.target], (*node.args, source)
    if assignments:
        module.recompile()


def _is_new(assignment: fx.Node) -> bool:
    """Return whether an assigned value has memory of its own, that nothing else reads or writes."""
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


def _assign(old: torch.Tensor, value: torch.Tensor, source: str) -> torch.Tensor:
    # Dynamo's own example of the input has become the value, so that shapes are known no sooner than here.
    if old.shape != value.shape or old.dtype != value.dtype or old.device != value.device:
        kind = f"{_describe(value)}, where it has {_describe(old)}"
        raise _make_error(f"of another shape, dtype or device: {kind}", source)
    return old.copy_(value)


def _assign_unseen(old: torch.Tensor, value: torch.Tensor, source: str) -> torch.Tensor:
    with unseen_by_autograd(old):
        return _assign(old, value, source)


_ASSIGNMENTS: Mapping[Any, Callable[..., torch.Tensor]] = {
    torch.Tensor.set_: _assign,  # Dynamo's graph lowers the version again after it
    getattr(torch.ops.aten, "shallow_copy_data_", None): _assign_unseen,
}


def _describe(value: torch.Tensor) -> str:
    return f"{value.dtype}{list(value.shape)} on {value.device}".removeprefix("torch.")


def _make_error(why: str, source: str) -> DataAssignmentError:
    return DataAssignmentError(
        f"The forward assigns data to a buffer or a parameter {why}. A compiled model cannot exchange the memory of "
        "its tensors. Write `tensor.copy_(value)`, or assign `value.clone()`, or assign the attribute anew "
        f"(`self.name = value`).\n{source}"
    )
