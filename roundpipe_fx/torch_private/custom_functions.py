"""Functions with a backward of their own (``autograd.Function``) inside ``torch.func.grad``, ``vjp``, ``vmap``.

Dynamo traces such a function's forward alone where it sees no gradient, as under ``vmap``, and differentiates the
operations of the forward; and gradients of its backward, which a loss of gradients needs, are lost (torch 2.13). Both
are wrong without a word. So the graph breaks there, and PyTorch runs the transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["break_at_transformed_functions"]


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
        if active() and torch._C._functorch.peek_interpreter_stack() is not None:
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
