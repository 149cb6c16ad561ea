"""Incoming gradients that a step is not expected to pass, in compiled stages.

Such a stage is compiled for an expanded zero, which takes one element of memory and is read from there. If a gradient
arrives nevertheless, the stage is compiled again, for a contiguous one::

    loss.backward()                  logits' gradient: zeros(()).expand(…)    the usual code
    (loss + logits.sum()).backward()                   contiguous numbers     the code for these
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from roundpipe_fx.runtime.compiled_loops import Boxed
from roundpipe_fx.torch_private import ForkedLock, graph_module


def is_expanded(value: Any) -> bool:
    """Test for a tensor whose every element is the same memory."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.dim():
        return False
    return all(isinstance(step, int) and not step for step in value.stride())


def compile_by_arrival(
    module: fx.GraphModule, compiled: Callable[[fx.GraphModule], Boxed], compiling: ForkedLock
) -> Boxed:
    """Compile a stage module for the expanded inputs that it was traced with, and for others when they arrive.

    Args:
        compiling: held while something is compiled within a step.

    Returns:
        the stage, boxed.
    """
    usual = compiled(module)
    inputs = module.graph.find_nodes(op="placeholder")
    positions = [position for position, node in enumerate(inputs) if is_expanded(node.meta.get("val"))]
    if not positions:
        return usual
    others: dict[frozenset[int], Boxed] = {}

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        arrived = frozenset(position for position in positions if not is_expanded(arguments[position]))
        if not arrived:
            return usual(arguments)
        with compiling:
            if arrived not in others:
                others[arrived] = compiled(_with_contiguous_inputs(module, arrived))
        for position in arrived:
            arguments[position] = arguments[position].contiguous()
        return others[arrived](arguments)

    return call


def _with_contiguous_inputs(module: fx.GraphModule, positions: Collection[int]) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(module.graph._codegen)
    for position, node in enumerate(graph.find_nodes(op="placeholder")):
        if position in positions:
            value = node.meta["val"]
            with value.fake_mode:
                node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    return graph_module(module, graph, module._get_name())
