"""Patches of what Dynamo traces wrongly without a word (torch 2.13).

Functions with a backward of their own (``autograd.Function``) inside ``torch.func.grad``, ``vjp``, ``vmap``: Dynamo
traces such a function's forward alone where it sees no gradient, as under ``vmap``, and differentiates the operations
of the forward; and gradients of its backward, which a loss of gradients needs, are lost. So the graph breaks there, and
PyTorch runs the transform.

Updates of float64 scalars: a graph that reads a zero-dimensional float64 tensor on the CPU is traced twice. AOTAutograd
finds that the tensor is not a Python number, and makes Dynamo start again and remove it where only ``item`` reads it
(``OutputGraph.remove_tensorify_specialized_graphargs``). Dynamo then removes every node whose value is that tensor and
that has no reader other than ``item``. This is more than the input: the value of ``counter.add_(1)`` is the counter
too, and often has no reader at all. So the update would be lost, and the counter keep its value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["break_at_transformed_functions", "in_function_transform", "keep_float_updates"]


def in_function_transform() -> bool:
    """Return whether the current thread is inside a transform of ``torch.func``, such as ``vmap`` or ``grad``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def break_at_transformed_functions(active: Callable[[], bool]) -> None:
    """Make Dynamo break the graph at an ``autograd.Function`` inside a transform of ``torch.func``.

    Args:
        active: whether the current thread traces one of our compilations.
    """
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    apply: Any = AutogradFunctionVariable.call_apply
    if hasattr(apply, "roundpipe_fx"):
        return

    def apply_outside_of_transforms(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() and in_function_transform():
            name = self.fn_cls.__name__
            unimplemented(
                gb_type="autograd.Function inside a transform of torch.func",
                context=name,
                explanation=f"PyTorch's tracing differentiates {name}, an autograd.Function inside torch.func.grad, "
                "vjp or vmap, wrongly: it loses the backward, or its gradients. Eager PyTorch runs the transform.",
                hints=[],
            )
        return apply(self, *args, **kwargs)

    apply_outside_of_transforms.roundpipe_fx = True  # type: ignore[attr-defined]
    AutogradFunctionVariable.call_apply = apply_outside_of_transforms  # type: ignore[method-assign]


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
