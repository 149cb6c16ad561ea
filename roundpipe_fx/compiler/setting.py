"""Facts that lowering knows besides the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_fx.analysis.caching_allocator import History
from roundpipe_fx.analysis.cost import CostModel
from roundpipe_fx.analysis.step_of_calls import StepNeeds
from roundpipe_fx.compiler.run_passes import run_passes
from roundpipe_fx.ir.alternative_plans import PlansInTiles
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.options import Options, StageCompiler
from roundpipe_fx.passes.entry import Pass, PassContext, PassLevel


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Facts that lowering knows besides the graph.

    Attributes:
        context: what passes may know.
        share: of the budget that may be used.
        beyond_plan: bytes that compiled stages are assumed to hold beyond what the graph says.
        step: what the step holds besides this call, if it makes several.
        sent: bytes of values that leave for the host though the user has not asked for it, if their copies are hidden;
            the last of them may exceed it.
        host_limit: bytes that all these values have at most.
        read_in_tiles: gives what plans in tiles reach if the caller drops some outputs; ``None``: there are none.
        histories: blocks that the device's allocator has now, by which the plan is judged too.
    """

    passes: Sequence[Pass]
    context: PassContext
    share: float = 1.0
    beyond_plan: int = 0
    step: StepNeeds | None = None
    sent: int = 0
    host_limit: int = 0
    read_in_tiles: Callable[[frozenset[int]], PlansInTiles] | None = None
    histories: Sequence[History] = ()

    @property
    def options(self) -> Options:
        """The user's."""
        return self.context.options

    @property
    def device(self) -> torch.device:
        """The device to compile for."""
        return self.context.device

    @property
    def compiler(self) -> StageCompiler:
        """The compiler that runs the stage modules."""
        return self.context.compiler

    @property
    def costs(self) -> CostModel:
        """Of operations and transfers."""
        return self.context.costs

    def run(self, joint: JointGraph, level: PassLevel, start: int = 0, stop: int | None = None) -> JointGraph:
        """Run the passes of one level on a graph, which is rewritten; those in ``passes[start:stop]``."""
        return run_passes(joint, self.passes, level, self.context, start, stop)

    def with_decisions(self, **decided: Any) -> Setting:
        """The same, with decisions added to the context."""
        return dataclasses.replace(self, context=dataclasses.replace(self.context, **decided))
