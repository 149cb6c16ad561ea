"""Gradient accumulation in compiled stages: an out-of-place addition, which starts from zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.operators.gradient_sums import SUMMING, add_product_to


def make_sums_functional(module: fx.GraphModule) -> fx.GraphModule:
    """Replace in-place gradient accumulation by out-of-place additions. The module is rewritten in place."""
    aten = torch.ops.aten
    summing = [node for node in module.graph.nodes if node.target in SUMMING]
    for node in summing:
        node.target = aten.addmm.default if node.target is add_product_to else aten.add.Tensor
        value = node.args[0].meta["val"]
        with value.fake_mode:
            node.meta["val"] = torch.empty_like(value)
    if summing:
        module.recompile()
    return module


def start_from_zeros(
    module: fx.GraphModule, call: Callable[[list[Any]], tuple[Any, ...]]
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Make a compiled stage module start from zeros where no gradient has been accumulated yet.

    Args:
        module: the stage module that was compiled.
        call: the compiled module, boxed.

    Returns:
        a function that replaces ``None`` among the accumulated gradients by zeros, and calls ``call``.
    """
    totals = {node.args[0] for node in module.graph.nodes if node.target in SUMMING}
    placeholders = module.graph.find_nodes(op="placeholder")
    sums = {position: node.meta["val"] for position, node in enumerate(placeholders) if node in totals}
    if not sums:
        return call

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        for position, total in sums.items():
            if arguments[position] is None:
                arguments[position] = torch.empty_strided(
                    total.shape, total.stride(), dtype=total.dtype, device=total.device
                ).zero_()
        return call(arguments)

    return run
