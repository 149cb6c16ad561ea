"""Backwards that are called under autocast, though they were traced without.

Eager PyTorch casts the operands of a backward's products if ``backward()`` is called inside a region of autocast, which
PyTorch advises against. For products of numbers of a lower precision that makes no difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.source import find_line
from roundpipe_fx.torch_private import tree_leaves

_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


def full_precision_product(joint: fx.GraphModule, autocast: Collection[str]) -> fx.Node | None:
    """A product of a backward that autocast would compute with another dtype.

    Args:
        joint: a joint graph of AOTAutograd.
        autocast: types of devices for which autocast surrounds the forward.
    """
    for node in joint.graph.nodes:
        value = node.meta.get("val")
        if (
            getattr(node.target, "overloadpacket", None) in _PRODUCTS
            and node.meta.get("partitioner_tag") == "is_backward"
            and isinstance(value, torch.Tensor)
            and value.dtype is torch.float32
            and value.device.type in autocast
        ):
            return node
    return None


def warn_under_autocast(run: Callable[..., Any], product: fx.Node) -> Callable[..., Any]:
    """Let a compiled graph warn, once, if its backward is called under autocast."""
    device, line = product.meta["val"].device.type, find_line(product)
    is_warned = False

    def warn(_gradients: Any) -> None:
        nonlocal is_warned
        if is_warned or not torch.is_autocast_enabled(device):
            return
        is_warned = True
        warnings.warn(
            f"roundpipe_fx: backward() is called under autocast, but was traced without: the gradients of {line} are "
            "computed in float32, where eager PyTorch casts. Call backward() outside of the region, as PyTorch advises,"
            " or set torch._functorch.config.backward_pass_autocast before the model is compiled.",
            stacklevel=2,
        )

    def run_watched(*arguments: Any) -> Any:
        outputs = run(*arguments)
        if not is_warned:
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.grad_fn.register_prehook(warn)
                    break
        return outputs

    return run_watched
