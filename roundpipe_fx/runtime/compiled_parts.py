"""Compiled parts: a stage module whose collectives stay out of what a stage compiler compiles.

A compiler may start collectives in any order and at any time, so a rank whose stage raises would not know which of
them others still wait for (:mod:`roundpipe_fx.runtime.stage_collectives`). What lies between collectives is compiled,
part by part, and the collectives run one by one::

    ┌ part ┐               ┌ part ┐               ┌ part ┐
    │ x, w │  all_reduce   │      │  all_reduce   │      │
    │  mm  │  wait_tensor  │  …   │  wait_tensor  │  …   │
    └──────┘               └──────┘               └──────┘

No compiler fuses anything with a collective. What parts hand on is allocated for each part, not planned for the stage.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch import fx

from roundpipe_fx.ir.collectives import is_collective, starts_collective
from roundpipe_fx.ir.fingerprint import fingerprint
from roundpipe_fx.ir.joint_graph import copy_node, input_nodes
from roundpipe_fx.ir.options import StageCompiler
from roundpipe_fx.runtime.compiled_loops import Boxed
from roundpipe_fx.runtime.eager_stage import BoxedCall, eager_stage
from roundpipe_fx.runtime.stage_compiler import compile_stage
from roundpipe_fx.torch_private import boxed_codegen, graph_module


def compile_in_parts(module: fx.GraphModule, compiler: StageCompiler) -> Boxed:
    """Compile a stage module; if it has collectives, in parts.

    Args:
        compiler: Inductor or a callable.
    """
    if not any(starts_collective(node.target) for node in module.graph.nodes):
        return compile_stage(module, compiler)
    return eager_stage(split_at_collectives(module, lambda part: compile_stage(part, compiler)))


def split_at_collectives(module: fx.GraphModule, compiled: Callable[[fx.GraphModule], Boxed]) -> fx.GraphModule:
    """A stage module that calls a function for each part, and the collectives itself.

    Args:
        compiled: makes a part callable. Equal parts are compiled once.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    calls: dict[str, BoxedCall] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        copies[node] = copy_node(graph, node, copies.__getitem__)
    for nodes in _split_runs(module.graph):
        if is_collective(nodes[0].target):
            for node in nodes:
                copies[node] = copy_node(graph, node, copies.__getitem__)
            continue
        members = set(nodes)
        # Inputs of the part: what its nodes read and others have made, each once, in the order of reading.
        inputs = list(dict.fromkeys(s for node in nodes for s in input_nodes(node) if s not in members))
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
        # Equal parts are compiled once.
        digest = fingerprint(nodes, outputs, inputs)
        if digest not in calls:
            calls[digest] = BoxedCall(
                compiled(_make_part(module, f"{module._get_name()}_{len(calls)}", nodes, inputs, outputs))
            )
        results = graph.create_node(
            "call_function", calls[digest], ([copies[node] for node in inputs],), name=f"part_{len(graph.nodes)}"
        )
        for position, node in enumerate(outputs):
            copies[node] = graph.create_node("call_function", operator.getitem, (results, position), name=node.name)
            copies[node].meta = dict(node.meta)
    output = module.graph.output_node()
    graph.output(fx.node.map_arg(output.args[0], copies.__getitem__))
    graph.set_codegen(boxed_codegen())
    return graph_module(module, graph, module._get_name())


def _split_runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes between collectives, and each collective with the parts of its results, in order."""
    runs: list[list[fx.Node]] = []
    run_of: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in run_of:
            run = run_of[node.args[0]]  # parts may lie far from the tuple, which no compiled part can take or return
        elif is_collective(node.target) or not runs or is_collective(runs[-1][0].target):
            run = []
            runs.append(run)
        else:
            run = runs[-1]
        run.append(node)
        run_of[node] = run
    return runs


def _make_part(
    module: fx.GraphModule, name: str, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    graph.set_codegen(boxed_codegen())
    return graph_module(module, graph, name)
