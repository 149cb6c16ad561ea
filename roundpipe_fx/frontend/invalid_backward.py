"""Graphs with a forward that runs and a backward that cannot be computed.

Eager PyTorch raises an error in ``backward()``, AOTAutograd as soon as the graph is compiled. A model whose backward
nobody calls, as in an evaluation without ``torch.no_grad()``, is run eagerly instead.
"""

from __future__ import annotations

import warnings

from roundpipe_fx.torch_private import PassedThrough

__all__ = ["InvalidBackwardError", "is_of_backward", "warn_of_invalid_backward"]

_ERRORS = (
    "needed for gradient computation has been modified by an inplace operation",
    "returned an invalid gradient",
    "returned an incorrect number of gradients",
    "derivative for ",
)
"""What autograd says; eagerly in ``backward()``."""


class InvalidBackwardError(PassedThrough, RuntimeError):
    """Autograd cannot compute the gradients of a graph."""


def is_of_backward(error: BaseException) -> bool:
    """Tell whether autograd raised an error in a backward, not the model in its forward."""
    text = str(error)
    return any(known in text for known in _ERRORS)


def warn_of_invalid_backward(error: InvalidBackwardError) -> None:
    """Warn that a graph runs eagerly."""
    reason = str(error).partition("\n")[0].partition(" Hint: ")[0].removesuffix(".")
    warnings.warn(
        f"roundpipe_fx: gradients cannot be computed: {reason}. The forward runs eagerly, no memory_budget bounds it, "
        "and backward() raises this error, as eager PyTorch does. Under torch.no_grad() the forward is compiled.",
        stacklevel=2,
    )
