"""Watched operators: what operators allocate for themselves where that depends on data, seen as steps run.

Of an operator that is not PyTorch's own nothing is known before it runs on real data, and it may need as much as a
whole layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from roundpipe_fx.analysis.cost import depends_on_data
from roundpipe_fx.ir.joint_graph import tensor_values
from roundpipe_fx.torch_private import boxed_codegen, graph_module, profile_memory, profiler_runs

__all__ = ["profile_operators"]


def profile_operators(module: fx.GraphModule, see: Callable[[str, int], None]) -> fx.GraphModule:
    """A stage module that tells what such operators allocate for themselves; the same one if it has none.

    Args:
        module: a stage module.
        see: told the operator's name and bytes, each time one runs; not while a profiler of the user's runs.
    """
    if not any(depends_on_data(node) for node in module.graph.nodes):
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if depends_on_data(node):
            node.target = _profiled(node.target, tensor_values(node), see)
    graph.set_codegen(boxed_codegen())
    return graph_module(module, graph, module._get_name())


def _profiled(target: Any, values: list[Any], see: Callable[[str, int], None]) -> Callable[..., Any]:
    name = str(target)
    device_type = values[0].device.type if values else "cpu"

    def run(*args: Any, **kwargs: Any) -> Any:
        if profiler_runs():
            return target(*args, **kwargs)
        return profile_memory(
            lambda: target(*args, **kwargs), device_type, lambda memory: see(name, memory.peak - memory.left)
        )

    run.__name__ = target._schema.name.replace("::", "_")
    return run
