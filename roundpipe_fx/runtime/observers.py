"""Observers: they report what a step shows and no plan could know.

These are data-dependent sizes, and workspaces that depend on data. Nothing is known about a custom operator before it
runs on real data, and its workspace may be as large as a layer's activations; nor about an operator with bodies, whose
workspace is what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import depends_on_data, learned_name
from roundpipe_fx.ir.joint_graph import tensor_values
from roundpipe_fx.torch_private import boxed_codegen, data_dependent_symbol, graph_module, profile_memory, profiler_runs

ObserveSize = Callable[[str, int], None]
"""Called with the name of a size and its value, or with the name of an operator and its bytes."""


def size_observer(nodes: Sequence[Any], see: ObserveSize) -> Callable[[Sequence[Any]], None] | None:
    """Make a function that reports the data-dependent sizes among results.

    Args:
        nodes: the nodes of the results, in order; constants are not nodes.
        see: called with each symbol's name and value.

    Returns:
        a function of the results; ``None`` if none of them has a data-dependent size.
    """
    positions: dict[str, tuple[int, int | None]] = {}
    for index, node in enumerate(nodes):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        sizes = list(enumerate(value.shape)) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            symbol = data_dependent_symbol(size)
            if symbol is not None:
                positions.setdefault(symbol, (index, dim))
    if not positions:
        return None

    def see_sizes(results: Sequence[Any]) -> None:
        for symbol, (index, dim) in positions.items():
            see(symbol, int(results[index] if dim is None else results[index].shape[dim]))

    return see_sizes


def profile_operators(module: fx.GraphModule, see: Callable[[str, int], None]) -> fx.GraphModule:
    """Measure the operators of a stage module whose workspace depends on data.

    Args:
        see: called with the operator's name and the bytes of its workspace each time that it runs, except while the
            user's own profiler runs.

    Returns:
        a copy of the module that reports its workspaces; the module itself if it has no such operator.
    """
    if not any(depends_on_data(node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if depends_on_data(node):
            node.target = _profiled(node.target, learned_name(node), tensor_values(node), see)
    graph.set_codegen(boxed_codegen())
    return graph_module(module, graph, module._get_name())


def _profiled(target: Any, name: str, values: list[Any], see: Callable[[str, int], None]) -> Callable[..., Any]:
    device_type = values[0].device.type if values else "cpu"

    def run(*args: Any, **kwargs: Any) -> Any:
        if profiler_runs():
            return target(*args, **kwargs)
        return profile_memory(
            lambda: target(*args, **kwargs), device_type, lambda memory: see(name, memory.peak - memory.retained)
        )

    run.__name__ = target.name().replace("::", "_").replace(".", "_")
    return run
