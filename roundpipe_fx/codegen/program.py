"""Programs: the order in which stage modules are called, as FX graphs of calls.

The forward program runs the forward of each stage, first to last, and returns the model's outputs and the saved values.
The backward program goes through the stages from last to first, and runs the recompute module of each one, then its
backward, whole or in two parts. Both follow AOTAutograd's calling convention, so that its runtime can call them. For
two blocks x ─ up ─ tanh ─ down ─▶ y, each a stage, of which the first one is recomputed (weights are left out)::

    forward(x)                         y0 = stage_0_forward(x)
                                       a1, y1 = stage_1_forward(y0)               a1: the tanh of the second block
                                       return y1, and saved: x, y0, a1
    backward(x, y0, a1, dy1)           dw1, dy0 = stage_1_backward(dy1, y0, a1)
                                       a0 = stage_0_recompute(x)
                                       dw0 = stage_0_backward(x, dy0, a0)
                                       return dw0, dw1
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
from torch import fx, nn

from roundpipe_fx.codegen.stage_modules import StageModule, value_name
from roundpipe_fx.ir.joint_graph import JointGraph, Phase, is_sum, is_symbolic_scalar, saved_values
from roundpipe_fx.torch_private import graph_module, is_opaque


@dataclass(frozen=True, kw_only=True)
class Program:
    """A graph of stage calls.

    Attributes:
        module: inputs, ``call_module`` nodes named after the stage modules, ``getitem`` of their results, output.
        calls: the stage modules, in the order of their first call.
        inputs: nodes of the joint graph that are its inputs.
        results: nodes of the joint graph that it returns, and constants.
        outputs: number of leading results that the caller gets: the model's outputs, or a gradient for each input.
    """

    name: str
    module: fx.GraphModule
    calls: tuple[StageModule, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[Any, ...]
    outputs: int


def emit_forward_program(joint: JointGraph, modules: Mapping[tuple[int, Phase], StageModule]) -> Program:
    """Emit the forward program.

    Its inputs are the primals; its results the forward's outputs, then saved tensors, then saved opaque objects, then
    saved symbolic scalars.
    """
    calls = [module for (_, phase), module in sorted(modules.items()) if phase is Phase.FORWARD]
    saved = _sort_saved(joint)
    results = [*joint.forward_outputs, *saved.tensors, *saved.objects, *saved.scalars]
    return _emit("forward", joint, joint.primals, calls, results, joint.num_forward_outputs)


def emit_backward_program(joint: JointGraph, modules: Mapping[tuple[int, Phase], StageModule]) -> Program:
    """Emit the backward program.

    Its inputs are saved symbolic scalars, saved tensors, saved opaque objects and tangents; its results one gradient
    per primal. In a pipeline there are also accumulated gradients among the inputs, and further contributions to
    gradients among the results.
    """
    calls = _sort_backward([module for (_, phase), module in modules.items() if phase is not Phase.FORWARD])
    saved = _sort_saved(joint)
    inputs = [*saved.scalars, *saved.tensors, *saved.objects, *joint.tangents, *joint.sums]
    return _emit("backward", joint, inputs, calls, joint.gradients, len(joint.gradients) - len(joint.parts))


def seen_by_autograd(backward: Program) -> fx.GraphModule:
    """A pipeline's backward with the inputs and results that AOTAutograd expects. It is inspected but never run.

    Args:
        backward: a program that may get accumulated gradients, and return further contributions to gradients.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results: Any = graph.graph_copy(backward.module.graph, copies)
    # Autograd passes no running sums: it sees the backward without them, with None where they would be read.
    for node, source in zip(backward.module.graph.find_nodes(op="placeholder"), backward.inputs, strict=True):
        if is_sum(source):
            for user in list(copies[node].users):
                arguments: Any = user.args[0]
                user.args = ([None if argument is copies[node] else argument for argument in arguments],)
            graph.erase_node(copies[node])
    graph.output(results[: backward.outputs])
    return graph_module(backward.module, graph, backward.module._get_name())


_PHASES = (Phase.RECOMPUTE, Phase.BACKWARD, Phase.WEIGHT)


def _sort_backward(modules: Sequence[StageModule]) -> list[StageModule]:
    """Stages in topological order, each completely before the next; of several candidates, the last in the model."""
    by_stage: dict[int, list[StageModule]] = {}
    maker: dict[fx.Node, int] = {}
    for module in modules:
        by_stage.setdefault(module.stage, []).append(module)
        maker.update(dict.fromkeys(module.outputs, module.stage))
    # The flow of gradients between stages; among stages that may run, the highest number first.
    flow: networkx.DiGraph[int] = networkx.DiGraph()
    flow.add_nodes_from(by_stage)
    for module in modules:
        flow.add_edges_from(
            (maker[s], module.stage) for s in module.inputs if maker.get(s, module.stage) != module.stage
        )
    stages = networkx.lexicographical_topological_sort(flow, key=lambda stage: -stage)
    return [m for stage in stages for m in sorted(by_stage[stage], key=lambda m: _PHASES.index(m.phase))]


@dataclass(frozen=True)
class _Saved:
    tensors: list[fx.Node]
    objects: list[fx.Node]
    scalars: list[fx.Node]


def _sort_saved(joint: JointGraph) -> _Saved:
    """Saved values by kind; tensors whose version counter autograd checks come first, as AOTAutograd has them."""
    tensors: list[fx.Node] = []
    objects: list[fx.Node] = []
    scalars: list[fx.Node] = []
    for node in saved_values(joint):
        kind = scalars if is_symbolic_scalar(node) else objects if is_opaque(node.meta.get("val")) else tensors
        kind.append(node)
    # AOTAutograd wants tensors without version checks behind the others.
    tensors.sort(key=lambda node: bool(node.meta.get("saved_tensor_with_no_vc_check", False)))
    return _Saved(tensors, objects, scalars)


class _StageCall(nn.Module):
    """A stage module as a submodule of a program's graph, which shares it and does not recompile it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        # As a submodule the stage would be copied and traced with the program.
        self.__dict__["_stage"] = module  # not a submodule

    def forward(self, arguments: list[Any]) -> Any:
        return self.__dict__["_stage"](arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StageCall:
        return self


def _emit(
    name: str,
    joint: JointGraph,
    inputs: Sequence[fx.Node],
    calls: Sequence[StageModule],
    results: Sequence[Any],
    outputs: int,
) -> Program:
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        values[source] = graph.placeholder(value_name(joint, source))
        values[source].target = values[source].name
        values[source].meta = dict(source.meta)
    root = nn.Module()
    for call in calls:
        root.add_module(call.name, _StageCall(call.module))
        result = graph.call_module(call.name, ([values[source] for source in call.inputs],))
        result.meta["val"] = tuple(node.meta.get("val") for node in call.outputs)
        for index, node in enumerate(call.outputs):
            item = graph.create_node("call_function", operator.getitem, (result, index), name=value_name(joint, node))
            item.meta = dict(node.meta)
            values[node] = item
    graph.output(tuple(values[node] if isinstance(node, fx.Node) else node for node in results))
    module = graph_module(root, graph, f"{name}_program")
    return Program(
        name=name, module=module, calls=tuple(calls), inputs=tuple(inputs), results=tuple(results), outputs=outputs
    )
