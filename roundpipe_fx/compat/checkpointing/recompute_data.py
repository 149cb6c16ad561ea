"""Data that a layer saves for its own recomputation: RoundPipe's runtime context.

::

    def forward(self, x):
        if roundpipe_fx.doing_recompute():
            (tokens,) = roundpipe_fx.get_recompute_data()
        else:
            tokens = self.route(x).nonzero()
            roundpipe_fx.save_for_recompute(tokens)
        ...

Eagerly, inside :func:`roundpipe_fx.checkpoint`, this runs as written. Compiled, the branch of the first pass is traced,
and the data that it saves is hoisted: it is saved, and never recomputed. (Host synchronizations like ``nonzero`` are
hoisted in any case; such branches are for other values that are small and expensive.)
"""

from __future__ import annotations

from typing import Any

import torch

from roundpipe_fx.compat.checkpointing.layer_pass import current_pass
from roundpipe_fx.ir.recompute_marks import save_in_graph
from roundpipe_fx.torch_private import tree_leaves


def save_for_recompute(*data: Any) -> None:
    """Save data for the recomputation of the layer that is running.

    At most once in a layer's forward. Has no effect if nothing will be recomputed: when gradients are off, outside any
    checkpointed layer, and in a recomputation itself.

    Args:
        *data: any pytrees; their tensors must not require grad.

    Raises:
        RuntimeError: the second call in one forward of a layer; names the layer.
        ValueError: a tensor requires grad. In a compiled model both are raised when it is compiled.
    """
    tensors = [leaf for leaf in tree_leaves(data) if isinstance(leaf, torch.Tensor)]
    if torch.compiler.is_compiling():
        save_in_graph(tensors)
        return
    running_pass = current_pass()
    if running_pass is None and not torch.is_grad_enabled():
        return
    where = "outside any checkpointed layer" if running_pass is None else f"in layer {running_pass.layer.name}"
    for tensor in tensors:
        if tensor.requires_grad:
            raise ValueError(
                f"save_for_recompute {where}: a tensor of shape {tuple(tensor.shape)} requires grad. What is saved is "
                "not differentiated through; save tensor.detach(), or let it be recomputed."
            )
    if running_pass is None or running_pass.recomputing:
        return
    if running_pass.layer.data is not None:
        raise RuntimeError(
            f"save_for_recompute was called a second time in one forward of layer {running_pass.layer.name}. "
            "Save everything in one call: save_for_recompute(a, b)."
        )
    running_pass.layer.data = data


def doing_recompute() -> bool:
    """Return whether this thread is recomputing a checkpointed layer. ``False`` in a compiled model.

    Returns:
        ``True`` in the recomputation of a layer, else ``False``.
    """
    if torch.compiler.is_compiling():
        return False
    running_pass = current_pass()
    return running_pass is not None and running_pass.recomputing


def get_recompute_data() -> tuple[Any, ...]:
    """Get the data that the recomputed layer saved: always a tuple, empty if it saved nothing.

    Returns:
        what was passed to :func:`save_for_recompute`, in that order.

    Raises:
        AssertionError: this thread is not recomputing a layer.
    """
    if not doing_recompute():
        raise AssertionError(
            "get_recompute_data outside of recomputation: ask doing_recompute() first, in the thread that recomputes."
        )
    running_pass = current_pass()
    assert running_pass is not None
    return running_pass.layer.data or ()
