"""Stage modules: one GraphModule for each stage and phase.

A stage module is stateless: parameters, saved values and gradients are all inputs, so it can run anywhere. It is
*boxed*: it takes one list and clears it, so that a value is freed at its last use inside. What a module computes for
others are its outputs; stages that do the same work on the same shapes share a graph::

    stage    phase        reads                          computes for others
    0        forward      w0, x                          y0
    1        forward      w1, y0                         y1, a1, which its backward reads
    1        backward     w1, dy1, y0, a1                dw1, dy0
    0        recompute    w0, x                          a0
    0        backward     w0, dy0, x, a0                 dw0
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import fx

from roundpipe_fx.ir.fingerprint import fingerprint
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, copy_node, has_side_effect, input_nodes, is_seeded
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.operators.gradient_sums import SUMMING
from roundpipe_fx.operators.partial_writes import PARTIAL_WRITES, copy_alike
from roundpipe_fx.torch_private import boxed_codegen, graph_module, tree_map_only

KnownModules: TypeAlias = dict[tuple[str, tuple[int, ...]], fx.GraphModule]
"""The graphs of stage modules, by fingerprint and the workspaces of their operations."""


@dataclass(frozen=True, kw_only=True)
class StageModule:
    """One emitted module.

    Attributes:
        stage: index of the stage.
        phase: the part of the stage that it runs.
        module: the graph; takes one list of the values of ``inputs`` and returns a tuple of those of ``outputs``.
            Stages with equal fingerprints share it, so the names of its values are those of the first one.
        inputs: nodes of the joint graph that it reads.
        outputs: nodes of the joint graph that it computes for others.
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
    """A Python identifier for a value, the same in all emitted text: an input's label, else the node's name."""
    name = re.sub(r"\W+", "_", joint.label(node))
    if name in _TAKEN or keyword.iskeyword(name):
        return f"{name}_"
    return f"_{name}" if name[:1].isdigit() else name


_OWN = (*SUMMING, *PARTIAL_WRITES.values(), copy_alike)
_TAKEN = frozenset(
    {
        "aten",
        "args",
        "device",
        "inf",
        "nan",
        "operator",
        "streams",
        "torch",
        *(shadowing.__name__ for shadowing in _OWN),
    }
)
"""Names that emitted text uses itself."""


def emit_stage_modules(
    joint: JointGraph, rewrite: Callable[[fx.Graph], fx.Graph] | None = None, known: KnownModules | None = None
) -> dict[tuple[int, Phase], StageModule]:
    """Split the graph into stage modules.

    Args:
        joint: a graph in which every decision is explicit.
        rewrite: applied to each module's graph at the end.
        known: modules of other plans for the same graph, by what they do. Those are taken, and new ones are added.
            ``None``: all are made of this graph, with the names of its values.

    Returns:
        modules by stage and phase; phases in which a stage does nothing are absent.
    """
    pieces = _group_pieces(joint)
    position = {node: index for index, node in enumerate(joint.graph.nodes)}
    emitted: dict[tuple[int, Phase], StageModule] = {}
    alike: dict[str, fx.GraphModule] = {}
    for (stage, phase), nodes in sorted(pieces.items()):
        members = set(nodes)
        # Inputs in graph order, whatever order nodes read them in: equal stages have equal signatures.
        inputs = sorted({s for node in nodes for s in input_nodes(node) if s not in members}, key=position.__getitem__)
        outputs = [node for node in nodes if any(user not in members for user in node.users)]
        # A phase without results is kept only for its effects.
        if not outputs and not any(has_side_effect(node) or is_seeded(node) for node in nodes):
            continue
        # Stages that do the same on the same shapes share one module; workspaces are not in the fingerprint, so they
        # are part of the key.
        digest = fingerprint(nodes, outputs, inputs)
        if digest not in alike:
            key = digest, tuple([node.meta.get(Mark.WORKSPACE, 0) for node in nodes])
            module = known.get(key) if known is not None else None
            if module is None:
                module = _make_graph_module(joint, f"stage_{stage}_{phase}", nodes, inputs, outputs, rewrite)
            if known is not None:
                known[key] = module
            alike[digest] = module
        emitted[stage, phase] = StageModule(
            stage=stage,
            phase=phase,
            module=alike[digest],
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            fingerprint=digest,
        )
    return emitted


def own_nodes(joint: JointGraph, modules: Mapping[tuple[int, Phase], StageModule]) -> dict[str, dict[str, fx.Node]]:
    """Nodes of the program that those of each stage module stand for; stages that are alike share a graph.

    Args:
        joint: the graph that was split.

    Returns:
        by name of the stage module and of its node, the node of the joint graph; nodes that rewriting has added are
        absent.
    """
    pieces = _group_pieces(joint)
    first: dict[str, list[fx.Node]] = {}
    by_module = {}
    # Modules of equal stages have the names of the first one's nodes: pairs by position.
    for position, module in sorted(modules.items()):
        names = first.setdefault(module.fingerprint, pieces[position])
        by_module[module.name] = {
            node.name: node_of_piece for node, node_of_piece in zip(names, pieces[position], strict=True)
        }
    return by_module


def _group_pieces(joint: JointGraph) -> dict[tuple[int, Phase], list[fx.Node]]:
    pieces: dict[tuple[int, Phase], list[fx.Node]] = {}
    for node in joint.computed():
        pieces.setdefault((node.meta[Mark.STAGE], node.meta[Mark.PHASE]), []).append(node)
    return pieces


def _make_graph_module(
    joint: JointGraph,
    name: str,
    nodes: Iterable[fx.Node],
    inputs: Iterable[fx.Node],
    outputs: Iterable[fx.Node],
    rewrite: Callable[[fx.Graph], fx.Graph] | None,
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in inputs:
        copies[source] = graph.placeholder(value_name(joint, source))
        copies[source].target = copies[source].name  # FX renames it if a node has the same name
        copies[source].meta = _copy_kept_meta(source)
    for node in nodes:
        copies[node] = copy_node(graph, node, copies.__getitem__)
        copies[node].meta = _copy_kept_meta(node)
    graph.output(tuple(copies[node] for node in outputs))
    if rewrite is not None:
        rewrite(graph)
    graph.set_codegen(boxed_codegen())
    return graph_module(joint.module, graph, name)


def moved(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a stage module for another device, on which it creates tensors.

    Args:
        module: the stage module. Values on the CPU (generator states) stay there.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.set_codegen(module.graph._codegen)
    for node in graph.nodes:
        if isinstance(node.target, TileLoop):
            node.target = node.target.map_bodies(lambda body: moved(body, device))
        # Devices in arguments (of factories) are part of the trace, so they move as well; those on the CPU stay.
        node.args, node.kwargs = tree_map_only(
            torch.device,
            lambda original: original if _stays_on_host(original, device) else device,
            (node.args, node.kwargs),
        )
        value = node.meta.get("val")
        if value is not None:
            node.meta["val"] = tree_map_only(torch.Tensor, lambda tensor: _make_fake_on(tensor, device), value)
    return graph_module(module, graph, module._get_name())


def _make_fake_on(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if _stays_on_host(value.device, device):
        return value
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)


def _stays_on_host(original: torch.device, device: torch.device) -> bool:
    return original.type == "cpu" and device.type not in ("cpu", "meta")


_KEPT_META = (
    "val",
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "unbacked_bindings",
    Mark.ORIGIN,
    Mark.WORKSPACE,
    Mark.UNTRIED,
)


def _copy_kept_meta(node: fx.Node) -> dict[str, object]:
    return {key: node.meta[key] for key in _KEPT_META if key in node.meta}
