"""Passes as entries of a list, with the level that each works at, and the facts it may know besides the graph."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roundpipe_fx.analysis.cost import CostModel
from roundpipe_fx.analysis.remat_schedule import RematSchedule
from roundpipe_fx.analysis.tiling import TileRegion
from roundpipe_fx.ir.decisions import ValueOnHost
from roundpipe_fx.ir.options import Options, StageCompiler
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition


class PassLevel(enum.StrEnum):
    """The form of the graph that a pass works on; levels run in this order."""

    JOINT = "joint graph"
    OUTPUTS = "joint graph for one caller"
    SUMMED = "graph to be tiled"
    TILED = "tiled graph"
    ANNOTATED = "annotated graph"
    SEGMENTED = "segmented graph"
    STAGED = "staged graph"
    PLANNED = "planned graph"
    STAGE_MODULE = "stage module"
    PROGRAM = "program"


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """Facts that a pass may know besides the graph. Decisions between levels are added to it.

    Attributes:
        device: the device to compile for.
        compiler: what runs the stage modules.
        costs: modelled seconds of operations and transfers on the device.
        training: whether the graph has a backward.
        registered_syncs: operators that the user declared to force a host sync.
        workspaces: bytes that operators and compiled stages have been seen to allocate internally, by name.
        microbatches: number of microbatches that a batch is split into.
        recomputes: whether the plan may recompute values.
        one_plan: whether all ranks follow the same plan, so that what it recomputes may communicate.
        unread: numbers of outputs that the caller is assumed to drop without reading them.
        tiles: regions that are carried out in tiles, with the number of tiles.
        updates_whole: whether an input that is updated must be read and updated in one segment.
        segment_starts: forward positions at which segments begin, if that is known.
        stage_starts: the first segment of each stage, if that is known.
        fewest_stages: whether stages are as long as a compiler gains by: nothing that is recomputed needs their ends.
        roundpipe_partition: the segments of each slot; ``None`` unless the schedule is RoundPipe's.
        everything_saved: whether the graph is for plans that save everything.
        schedule: what is recomputed and when, with nodes of this graph; ``None``: nothing.
        early: whether ``early_recompute`` runs; the planner decides itself what is early.
        split: whether gradients of parameters are computed in modules of their own.
        sums: whether stage modules add gradients to those of earlier microbatches.
        program: ``"forward"`` or ``"backward"``, for passes on programs.
        overlapped: names of the stage modules that gain by running beside the module that is called before them.
        runs_programs: whether the programs run, and not a schedule of their stage modules.
        host_copies: values that are on the host between the programs.
        dump: folder to which graphs are written after each pass; ``None``: nowhere.
    """

    options: Options
    device: torch.device
    compiler: StageCompiler
    costs: CostModel
    training: bool = True
    registered_syncs: Collection[Any] = ()
    workspaces: Mapping[str, int] | None = None
    microbatches: int = 1
    recomputes: bool = False
    one_plan: bool = False
    unread: frozenset[int] = frozenset()
    tiles: Sequence[tuple[TileRegion, int]] = ()
    updates_whole: bool = False
    segment_starts: Sequence[int] | None = None
    stage_starts: Sequence[int] | None = None
    fewest_stages: bool = False
    roundpipe_partition: RoundPipePartition | None = None
    everything_saved: bool = False
    schedule: RematSchedule | None = None
    early: bool = False
    split: bool = False
    sums: bool = False
    program: str = ""
    overlapped: Collection[str] = ()
    runs_programs: bool = False
    host_copies: Sequence[ValueOnHost] = ()
    dump: Path | None = None


def always(_: PassContext) -> bool:
    """always"""
    return True


@dataclass(frozen=True)
class Pass:
    """One entry of the list.

    Attributes:
        name: unique in the list; the name of its file in ``passes/``.
        run: gets the graph and the context, and returns the graph: a
            :class:`roundpipe_fx.ir.joint_graph.JointGraph`, or for stage modules and programs the very
            ``torch.fx.Graph`` that it got, rewritten in place.
        level: the level that it works at.
        when: whether it runs; the first line of its docstring says so in the table.
        needs: names of passes that must run before it.
        changes_numerics: whether results may differ by rounding from those of the captured graph, or of the sum of
            its microbatches' gradients. The others change no bits where stages run eagerly.
    """

    name: str
    run: Callable[[Any, PassContext], Any]
    level: PassLevel = field(default=PassLevel.JOINT, kw_only=True)
    when: Callable[[PassContext], bool] = field(default=always, kw_only=True)
    about: str = field(default="", kw_only=True)
    needs: tuple[str, ...] = field(default=(), kw_only=True)
    changes_numerics: bool = field(default=False, kw_only=True)
