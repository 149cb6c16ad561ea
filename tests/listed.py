"""Captured graphs as the list of passes makes them, up to where a test looks at them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection

from torch import fx

from roundpipe_fx.analysis.remat_schedule import RematSchedule
from roundpipe_fx.codegen import StageModule, emit_stage_modules
from roundpipe_fx.compiler.operations_in_tiles import cut_graph
from roundpipe_fx.compiler.run_passes import run_passes
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Phase
from roundpipe_fx.ir.options import Options
from roundpipe_fx.passes.entry import Pass, PassLevel
from roundpipe_fx.planner.lower import run_common_passes

__all__ = ["annotated", "planned", "stage_modules", "staged"]


def annotated(joint: JointGraph) -> tuple[JointGraph, Setting]:
    """After the passes on joint graphs; kernels are not measured."""
    return run_common_passes(joint, Options(passes=_without("workspaces")), ())


def staged(joint: JointGraph, stages: int | str = "auto", left_out: Collection[str] = ()) -> tuple[JointGraph, Setting]:
    """After the passes on staged graphs.

    Args:
        joint: a captured graph; it is rewritten.
        stages: as the option; fewer where there are not so many segments.
        left_out: passes that do not run.
    """
    joint, setting = run_common_passes(joint, Options(passes=_without("workspaces", *left_out), stages=stages), ())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="roundpipe_fx: stages=")
        return setting.run(cut_graph(joint, setting), PassLevel.STAGED), setting


def planned(joint: JointGraph, setting: Setting, schedule: RematSchedule, early: bool = False) -> JointGraph:
    """After the passes that write a decision into the graph.

    Args:
        joint: a staged graph; it is rewritten.
        setting: as from :func:`staged`.
        schedule: the decision.
        early: whether further operations of the backward run early.
    """
    return setting.with_decisions(schedule=schedule, early=early).run(joint, PassLevel.PLANNED)


def stage_modules(joint: JointGraph, setting: Setting) -> dict[tuple[int, Phase], StageModule]:
    """The stage modules of a planned graph, after the passes on them."""

    def rewrite(graph: fx.Graph) -> fx.Graph:
        return run_passes(graph, setting.passes, PassLevel.STAGE_MODULE, setting.context)

    return emit_stage_modules(joint, rewrite)


def _without(*names: str) -> Callable[[list[Pass]], list[Pass]]:
    return lambda passes: [item for item in passes if item.name not in names]
