"""Reading the plan off a finished graph: what was saved, hoisted, recomputed and replayed, and what it costs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

from roundpipe_fx.analysis.cost import COMPILED_STAGES, depends_on_data
from roundpipe_fx.analysis.simulator import PeakMoment
from roundpipe_fx.codegen import Program, StageModule
from roundpipe_fx.compiler.plan_cache import Recalled
from roundpipe_fx.ir.joint_graph import (
    JointGraph,
    Mark,
    Phase,
    input_nodes,
    is_tensor,
    is_view,
    module_path,
    saved_values,
    tensor_values,
)
from roundpipe_fx.ir.segment import Segment, StageCut
from roundpipe_fx.ir.text import type_text
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.report.plan import Plan, PlannedStage, PlannedTiles, PlannedValue
from roundpipe_fx.torch_private import assumed_sizes, input_sizes, module_path_text, size_hint

__all__ = ["make_plan"]


def make_plan(
    joint: JointGraph,
    segments: Sequence[Segment],
    cuts: Sequence[StageCut],
    modules: Mapping[tuple[int, Phase], StageModule],
    forward: Program,
    backward: Program | None,
    recompute: str,
    peak: PeakMoment,
    chosen: Chosen | Recalled | None = None,
    beyond_plan: int = 0,
    alive: int = 1,
) -> Plan:
    """Read the plan off a finished graph.

    ``beyond_plan``: bytes, in the peak too, that compiled stages are taken to hold beyond what the graph says.
    ``alive``: how many calls are taken to be alive at once, in the peak too.
    """
    saved = [node for node in saved_values(joint) if node.op != "placeholder"] if backward is not None else []
    by_stage: dict[int, list[fx.Node]] = {cut.index: [] for cut in cuts}
    for node in joint.computed():
        by_stage[node.meta[Mark.STAGE]].append(node)
    costs = _Costs(joint, saved)
    stages = []
    first: dict[tuple[str, ...], int] = {}
    for cut in cuts:
        nodes = by_stage[cut.index]
        own_saved = [node for node in saved if node.meta[Mark.STAGE] == cut.index]
        again = [node for node in nodes if Mark.ORIGIN in node.meta and is_tensor(node)]
        forward_nodes = [node for node in nodes if node.meta[Mark.PHASE] is Phase.FORWARD]
        repeated = [node for node in nodes if Mark.ORIGIN in node.meta]
        digests = tuple(modules[cut.index, phase].fingerprint for phase in Phase if (cut.index, phase) in modules)
        same = first.setdefault(digests, cut.index)
        stages.append(
            PlannedStage(
                index=cut.index,
                modules=_modules_text(nodes),
                segments=(cut.first, cut.last),
                forward_seconds=_seconds(forward_nodes),
                recompute_seconds=_seconds(repeated),
                backward_seconds=_seconds(nodes) - _seconds(forward_nodes) - _seconds(repeated),
                early_seconds=_seconds(node for node in nodes if node.meta[Mark.PHASE] is Phase.RECOMPUTE),
                entry_bytes=segments[cut.first].entry_bytes,
                saved=_values(costs, (node for node in own_saved if not _hoist_reason(node))),
                hoisted=_values(costs, (node for node in own_saved if _hoist_reason(node))),
                recomputed=_values(
                    costs, (node for node in again if node.meta.get(Mark.BYTES) or Mark.REPLAYED in node.meta)
                ),
                replayed=_values(
                    costs, (node for node in nodes if Mark.REPLAYED in node.meta and Mark.ORIGIN in node.meta)
                ),
                passing=_values(costs, (node for node in nodes if costs.is_passing(node))),
                same_as=None if same == cut.index else same,
            )
        )
    different = len({segment.fingerprint for segment in segments})
    programs = (forward,) if backward is None else (forward, backward)
    tangents = [value for node in joint.tangents for value in tensor_values(node)]
    return Plan(
        stages=tuple(stages),
        segments=(len(segments), different),
        recompute=recompute,
        budget=chosen.limit if chosen is not None else None,
        peak=peak,
        trade_off=chosen.frontier if chosen is not None else (),
        assumed={
            **_assumed_of_data(joint),
            **_assumed_workspaces(joint),
            **({f"workspace of {COMPILED_STAGES}": beyond_plan} if beyond_plan else {}),
            **({"calls alive at once": alive} if alive > 1 else {}),
        },
        sizes=_largest_inputs(joint),
        training=backward is not None,
        static=all(isinstance(size, int) for value in tangents for size in value.shape),
        outputs=joint.num_forward_outputs,
        modules=tuple(modules.values()),
        programs=programs,
        read_operations=chosen.read_operations if chosen is not None else None,
        tiles=tuple(_tiles(node, node.target) for node in joint.computed() if isinstance(node.target, TileLoop)),
    )


def _tiles(node: fx.Node, loop: TileLoop) -> PlannedTiles:
    widest = loop.widest
    return PlannedTiles(
        name=widest.name,
        module=module_path(node, module_path_text),
        type=type_text(torch.empty(widest.shape, dtype=widest.dtype, device="meta")),
        bytes=widest.bytes,
        rows=loop.rows,
        tiles=loop.tiles,
        seconds=node.meta[Mark.SECONDS],
    )


def _seconds(nodes: Iterable[fx.Node]) -> float:
    return sum(node.meta[Mark.SECONDS] for node in nodes)


def _values(costs: _Costs, nodes: Iterable[fx.Node]) -> tuple[PlannedValue, ...]:
    found: dict[str, PlannedValue] = {}
    for node in nodes:
        name = node.meta.get(Mark.ORIGIN, node.name)
        found.setdefault(
            name,
            PlannedValue(
                name=name,
                module=module_path(node, module_path_text),
                type=type_text(node.meta.get("val")),
                bytes=_bytes(node),
                reason=_hoist_reason(node) or str(node.meta.get(Mark.MUST_RECOMPUTE, "")),
                seconds=costs.seconds(node),
                times=costs.times[name],
                again_seconds=costs.again(node),
            ),
        )
    return tuple(found.values())


def _assumed_of_data(joint: JointGraph) -> dict[str, int]:
    """What sizes that depend on data are taken to be, by symbol."""
    of_inputs = {size.symbol for size in input_sizes(joint.module)}
    return {symbol: size for symbol, size in assumed_sizes(joint.module).items() if symbol not in of_inputs}


def _largest_inputs(joint: JointGraph) -> dict[str, int]:
    """The largest inputs that were planned for, by input and dimension."""
    assumed = assumed_sizes(joint.module)
    return {
        f"{joint.label(size.node)}, dimension {size.dim}": size_hint(size.size)
        for size in input_sizes(joint.module)
        if size.symbol in assumed
    }


def _assumed_workspaces(joint: JointGraph) -> dict[str, int]:
    """Bytes that operators are taken to allocate for themselves where that depends on data."""
    return {
        f"workspace of {node.target}": node.meta[Mark.WORKSPACE]
        for node in joint.computed()
        if Mark.WORKSPACE in node.meta and depends_on_data(node)
    }


class _Costs:
    """What values cost in a finished graph."""

    def __init__(self, joint: JointGraph, saved: Iterable[fx.Node]) -> None:
        self._saved = {node.name for node in saved}
        self._makes: dict[fx.Node, tuple[float, list[fx.Node]]] = {}
        self.times = Counter(node.meta[Mark.ORIGIN] for node in joint.computed() if Mark.ORIGIN in node.meta)

    def is_passing(self, node: fx.Node) -> bool:
        """Whether a value is one that only the forward needs."""
        forward = node.meta[Mark.PHASE] is Phase.FORWARD and is_tensor(node) and not is_view(node)
        return forward and node.name not in self._saved and not self.times[node.name]

    def seconds(self, node: fx.Node) -> float:
        """Modelled seconds of the operation that makes a value."""
        maker = node
        while not maker.meta.get(Mark.SECONDS) and isinstance(maker.meta.get("val"), torch.Tensor):
            sources = [s for s in input_nodes(maker) if isinstance(s.meta.get("val"), (tuple, list))]
            if maker.target is not operator.getitem or not sources:
                break
            maker = sources[0]
        return float(maker.meta.get(Mark.SECONDS, 0.0))

    def again(self, node: fx.Node) -> float:
        """Modelled seconds of making a value again from what is kept and what is at hand."""
        total, pending, seen = 0.0, [node], {node}
        while pending:
            current = pending.pop()
            if current not in self._makes:
                self._makes[current] = self._making(current)
            seconds, sources = self._makes[current]
            total += seconds
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
        return total

    def _making(self, node: fx.Node) -> tuple[float, list[fx.Node]]:
        """Seconds of an operation, and what of what it reads has to be made for it."""
        sources = input_nodes(node)
        made = [source for source in sources if source.op != "placeholder" and source.name not in self._saved]
        return float(node.meta.get(Mark.SECONDS, 0.0)), made


def _bytes(node: fx.Node) -> int:
    """Bytes of the storages that the node's value keeps alive."""
    found = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensor_values(node)}
    return sum(size_hint(size) for size in found.values())


def _hoist_reason(node: fx.Node) -> str:
    if Mark.MUST_SAVE in node.meta:
        return str(node.meta[Mark.MUST_SAVE])
    for source in node.all_input_nodes:
        if Mark.MUST_SAVE in source.meta and isinstance(source.meta.get("val"), (tuple, list)):
            return str(source.meta[Mark.MUST_SAVE])
    return ""


def _modules_text(nodes: Sequence[fx.Node]) -> str:
    forward = [node for node in nodes if node.meta[Mark.PHASE] is Phase.FORWARD]
    paths = [module_path(node, module_path_text) for node in forward or nodes]
    paths = [path for path in paths if path] or [""]
    if paths[0] == paths[-1]:
        return paths[0] or "model"
    return f"{paths[0]} … {paths[-1]}"
