"""Sums of gradients in stages that a compiler makes: an ordinary addition, which begins with zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.gradient_sums import SUMMING, add_product_to

__all__ = ["from_zero", "functional_sums"]


def functional_sums(module: fx.GraphModule) -> fx.GraphModule:
    """Replace additions in place by such that make a new sum. The module is rewritten."""
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


def from_zero(
    module: fx.GraphModule, call: Callable[[list[Any]], tuple[Any, ...]]
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Have a compiled stage module begin with zeros where nothing has been added up.

    Args:
        module: what was compiled.
        call: it, compiled and boxed.
    """
    totals = {node.args[0] for node in module.graph.nodes if node.target in SUMMING}
    placeholders = module.graph.find_nodes(op="placeholder")
    sums = {place: node.meta["val"] for place, node in enumerate(placeholders) if node in totals}
    if not sums:
        return call

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        for place, like in sums.items():
            if arguments[place] is None:
                arguments[place] = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=like.device
                ).zero_()
        return call(arguments)

    return run
