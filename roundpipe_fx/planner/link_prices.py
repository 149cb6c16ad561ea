"""Link prices: the save options that segments of a pipeline choose when each offloaded byte has a price in seconds.

The price is a multiple of the seconds in which the link carries a byte::

    price 0        everything that saves recomputation is offloaded
    price 1        a byte costs as much as if a device waited for its copy: little is offloaded
    in between     the simulated schedules decide which price gives the shortest step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.ir.segment import StageCut
from roundpipe_fx.planner.evaluation import ScheduleEvaluation
from roundpipe_fx.planner.segments_on_host import segments_on_host
from roundpipe_fx.remat.chain import Decision, SegmentChain
from roundpipe_fx.remat.in_flight import SegmentRun
from roundpipe_fx.remat.options_on_host import SegmentOnHost, decisions_at_price, has_fitting_options
from roundpipe_fx.remat.schedule import RematChoice
from roundpipe_fx.remat.segment_chain import SaveOption, make_remat_choice


class LinkPrices:
    """Choices of what is saved, by the price of the link.

    Args:
        save_options: what its options save.
        runs: of segments whose saved values lie on the same devices.
        first: the attempt that saves everything.
        cuts: the stages, in the order in which they run.
    """

    def __init__(
        self,
        *,
        graph: OperationGraph,
        chain: SegmentChain,
        save_options: list[list[SaveOption]],
        runs: Sequence[SegmentRun],
        first: ScheduleEvaluation,
        cuts: Sequence[StageCut],
    ) -> None:
        self._graph, self._chain, self._save_options, self._runs = graph, chain, save_options, runs
        costs = first.emitted.main.costs
        assert costs.host_bandwidth is not None
        self._segments = segments_on_host(first.timing, costs, cuts, chain, runs)
        self._byte_seconds = 1 / costs.host_bandwidth

    def can_fit(self, limit: int) -> bool:
        """Return whether the chain knows a way to stay within so many bytes of a device."""
        return all(has_fitting_options(*self._part(run), limit) for run in self._runs)

    def choose_at_price(self, price: float, limit: int) -> RematChoice:
        """Choose what is saved at a price, within a limit or as near to it as possible.

        Args:
            price: of a byte, as a multiple of the seconds in which the link carries it.
            limit: bytes of a device.
        """
        decisions: list[Decision] = []
        for run in self._runs:
            decisions_of_run = decisions_at_price(*self._part(run), limit, price * self._byte_seconds)
            decisions += [_shift_decision(decision, run.first) for decision in decisions_of_run]
        return make_remat_choice(self._graph, self._save_options, decisions)

    def _part(self, run: SegmentRun) -> tuple[SegmentChain, Sequence[SegmentOnHost]]:
        return self._chain.part(run.first, run.end, alone=True), self._segments[run.first : run.end]


def _shift_decision(decision: Decision, first: int) -> Decision:
    """A decision of a part of the chain that begins at a segment, as one of the chain."""
    return dataclasses.replace(decision, stage=decision.stage + first, until=decision.until + first)
