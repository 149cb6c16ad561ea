"""From a graph that is not cut to the operations that plans are searched for, whole or with regions in tiles.

::

    annotated graph ── cut_graph ──▶ segments, stages ── (staged passes) ── read_graph_operations ──▶ operations
          │                                                                        ▲
          └─ split_means ── tile_graph, for each choice of regions and counts ─────┘  cut and read in the same way

A region in tiles is one loop in the graph, so it is one operation: the search for recomputation does not look into it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from torch import fx

from roundpipe_fx.analysis.cost import tensor_bytes
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.analysis.simulator import allocation_granularity
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.analysis.tiling import TileRegion
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, saved_values, tensor_values
from roundpipe_fx.ir.options import Inductor
from roundpipe_fx.ir.recompute_marks import read_region_budget
from roundpipe_fx.ir.segment import backward_stages
from roundpipe_fx.passes.cse import common_subexpressions
from roundpipe_fx.passes.entry import PassLevel
from roundpipe_fx.remat.least_bytes import LeastBytes, least_bytes

_WORTH_SHARING = 0.001
"""Share of what the backward reads that equal values must hold."""


def cut_graph(joint: JointGraph, setting: Setting) -> JointGraph:
    """Cut a graph into segments and stages."""
    for level in (PassLevel.ANNOTATED, PassLevel.SEGMENTED):
        joint = setting.run(joint, level)
    return joint


def with_fewest_stages(setting: Setting) -> Setting:
    """The same for programs that recompute nothing: stages that Inductor compiles are as long as it gains by.

    Ends of stages keep recomputation where it was planned, and let eager ones start copies; else they cost kernels.
    """
    return setting.with_decisions(fewest_stages=isinstance(setting.compiler, Inductor))


def copy_uncut(joint: JointGraph) -> JointGraph:
    """Copy a graph without its segments and stages.

    Args:
        joint: an annotated graph; not changed.
    """
    copy = joint.copy()
    for node in copy.computed():
        node.meta.pop(Mark.SEGMENT, None)
        node.meta.pop(Mark.STAGE, None)
    return copy


def split_means(joint: JointGraph, setting: Setting) -> JointGraph:
    """A copy of a graph, not cut, in which means are sums that are divided."""
    return setting.run(copy_uncut(joint), PassLevel.SUMMED)


def tile_graph(joint: JointGraph, tiles: Sequence[tuple[TileRegion, int]], setting: Setting) -> JointGraph:
    """A copy of a graph in which regions are loops."""
    return setting.with_decisions(tiles=tiles).run(joint.copy(), PassLevel.TILED)


def read_graph_operations(joint: JointGraph, setting: Setting, sums: bool = False) -> OperationGraph:
    """Read the operations of a graph for the planner.

    Args:
        joint: a graph with stages; not changed.
        setting: what else there is to know.
        sums: whether gradients of parameters are added to sums that exist already.
    """
    granularity, in_place = allocation_granularity(setting.device), setting.compiler == "eager"
    operations = read_operations(joint, len(joint.segments), granularity, in_place, sums)
    return dataclasses.replace(operations, stages=backward_stages(joint.cuts))


def compute_least_bytes(joint: JointGraph, setting: Setting) -> LeastBytes:
    """Bytes that a step needs under every plan.

    Args:
        joint: a training graph that is not cut; not changed.
        setting: what else there is to know.
    """
    staged = setting.run(cut_graph(joint.copy(), setting), PassLevel.STAGED)
    return least_bytes(read_graph_operations(staged, setting))


def add_gradients_to_needs(step: StepNeeds | None, joint: JointGraph) -> StepNeeds | None:
    """Needs of a step, with the gradients of the graph that is planned: no plan changes them."""
    if step is None:
        return None
    gradients: Counter[int] = Counter()
    for owner, node in zip(joint.gradient_owners, joint.gradients, strict=True):
        if isinstance(node, fx.Node) and owner is not None:
            gradients[owner] += tensor_bytes(tensor_values(node))
    return dataclasses.replace(step, gradients=dict(gradients))


def without_common_subexpressions(joint: JointGraph, setting: Setting) -> JointGraph | None:
    """A copy that the passes for plans that save everything have run on.

    ``None`` if hardly any values are equal, or parts of the model have budgets of their own or are not kept.
    """
    forward = joint.in_phase(Phase.FORWARD)
    if any(read_region_budget(node) is not None or Mark.MUST_RECOMPUTE in node.meta for node in forward):
        return None
    # What merging equal values would free, against all that is saved: only a share that matters is worth a second
    # graph.
    saved = sum(tensor_bytes(tensor_values(node)) for node in saved_values(joint) if node.op != "placeholder")
    freed = sum(tensor_bytes(tensor_values(node)) for node in common_subexpressions(joint))
    # A few numbers that layers count with are not worth reading the graph once more.
    if freed <= _WORTH_SHARING * saved:
        return None
    return setting.with_decisions(everything_saved=True).run(joint.copy(), PassLevel.STAGED)
