"""Stage modules: one GraphModule for each stage and phase.

A stage module is stateless: parameters, saved values and gradients are all inputs, so it can run anywhere. It is
*boxed*: it takes one list and clears it, so that a value dies at its last use inside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from roundpipe_fx.fingerprint import fingerprint
from roundpipe_fx.joint_graph import JointGraph, Mark, Phase, input_nodes
from roundpipe_fx.torch_private import boxed_codegen

__all__ = ["StageModule", "emit_stage_modules", "value_name"]


@dataclass(frozen=True)
class StageModule:
    """One emitted module.

    Attributes:
        stage: index of the stage.
        phase: which part of the stage it runs.
        module: the graph; takes one list of the values of ``inputs``, returns a tuple of those of ``outputs``.
        inputs: nodes of the joint graph that it reads.
        outputs: nodes of the joint graph that it makes for others.
        fingerprint: equal for modules that do the same work on the same shapes.
    """

    stage: int
    phase: Phase
    module: fx.GraphModule
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    fingerprint: str

    @property
    def name(self) -> str:
        """``stage_<index>_<phase>``, the name under which the program calls it."""
        return f"stage_{self.stage}_{self.phase}"


def value_name(joint: JointGraph, node: fx.Node) -> str:
    """A Python identifier for a value, the same in every emitted text: from the label of an input, else the node's."""
    name = re.sub(r"\W+", "_", joint.label(node))
    return f"_{name}" if name[:1].isdigit() else name


def emit_stage_modules(joint: JointGraph) -> dict[tuple[int, Phase], StageModule]:
    """Cut the graph into its stage modules. Phases in which a stage has nothing to do are absent."""
    pieces: dict[tuple[int, Phase], list[fx.Node]] = {}
    for node in joint.computed():
        pieces.setdefault((node.meta[Mark.STAGE], node.meta[Mark.PHASE]), []).append(node)
    position = {node: index for index, node in enumerate(joint.graph.nodes)}
    emitted = {}
    for (stage, phase), nodes in sorted(pieces.items()):
        module = _emit(joint, stage, phase, nodes, position)
        if module is not None:
            emitted[stage, phase] = module
    return emitted


def _emit(
    joint: JointGraph, stage: int, phase: Phase, nodes: list[fx.Node], position: Mapping[fx.Node, int]
) -> StageModule | None:
    members = set(nodes)
    inputs = sorted({s for node in nodes for s in input_nodes(node) if s not in members}, key=position.__getitem__)
    outputs = [node for node in nodes if any(user not in members for user in node.users)]
    if not outputs and not any(node.is_impure() for node in nodes):
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(value_name(joint, source))
        copies[source].meta = _kept_meta(source)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = _kept_meta(node)
    results = tuple(copies[node] for node in outputs)
    graph.output(results)
    graph.set_codegen(boxed_codegen())
    graph.lint()
    module = fx.GraphModule(joint.module, graph, class_name=f"stage_{stage}_{phase}")
    digest = fingerprint((node for node in graph.nodes if node.op != "output"), results)
    return StageModule(stage, phase, module, tuple(inputs), tuple(outputs), digest)


_KEPT_META = ("val", "stack_trace", "nn_module_stack", "fwd_nn_module_stack", "unbacked_bindings", Mark.ORIGIN)


def _kept_meta(node: fx.Node) -> dict[str, object]:
    return {key: node.meta[key] for key in _KEPT_META if key in node.meta}
