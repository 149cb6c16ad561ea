"""Rank plans: what is worked out once for each schedule of a pipeline over processes, and compared by its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from roundpipe_fx.distributed.gathering import refuse_escapes, steps_of, text_of
from roundpipe_fx.distributed.ownership import Ownership
from roundpipe_fx.distributed.transfer_orders import RankTransfers, check_transfers, orders_of, transfers_of
from roundpipe_fx.pipeline.captured_calls import CapturedCalls
from roundpipe_fx.pipeline.compared_texts import collectives_text, gradients_text, graph_text
from roundpipe_fx.pipeline.graph import PipelinedGraph, union
from roundpipe_fx.pipeline.scheduled import Scheduled
from roundpipe_fx.runtime.prefetch import PrefetchStep

__all__ = ["RankPlan", "RankPlans"]


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """What is worked out once for a schedule. Texts are compared by the ranks.

    Attributes:
        transfers: of this rank.
        graphs: the code of all stages.
        digest: of all ranks' orders.
        gradients: which stage actions compute those of the model's tensors.
        collectives: of each stage, in order.
        gathers: the parameters that are gathered from replicas, in order; ``None``: they are not sharded.
    """

    transfers: RankTransfers
    graphs: str
    digest: str
    gradients: str
    collectives: str
    gathers: str | None = None


class RankPlans:
    """The plans of a rank.

    Args:
        rank: its number in the pipeline.
        ownership: the model's tensors on it.
    """

    def __init__(self, rank: int, ownership: Ownership) -> None:
        self._rank, self._ownership = rank, ownership
        self._plans: dict[Any, RankPlan] = {}
        self._graphs: dict[int, tuple[PipelinedGraph, str]] = {}

    def of(self, captured: CapturedCalls, scheduled: Scheduled, kinds: Any) -> RankPlan:
        """The plan of a step, or of a part of it.

        Args:
            captured: the microbatches.
            scheduled: what all ranks run.
            kinds: which kinds of actions the run consists of; ``None``: all.
        """
        instructions = scheduled.instructions
        key = (kinds, *(id(program) for program in captured.programs))
        if key not in self._plans:
            transfers = transfers_of(instructions, captured.programs)
            orders = orders_of(instructions, transfers)
            reads = union([program.graph for program in captured.programs]).reads
            check_transfers(orders, reads, [transfer.late for transfer in transfers])
            names = {id(value): name for name, value in self._ownership.named()}
            gathers = None
            if self._ownership.shards.mesh is not None:
                refuse_escapes(instructions, captured.programs, captured.primals, names)
                ranks = range(len(instructions))
                gathers = "\n\n".join(text_of(self.gathers(captured, scheduled, rank), names) for rank in ranks)
            self._plans[key] = RankPlan(
                transfers=transfers[self._rank],
                graphs="\n\n".join(dict.fromkeys(self._text_of(graph) for graph in captured.graphs)),
                digest="\n".join(f"{rank}: {' '.join(map(str, order))}" for rank, order in enumerate(orders)),
                gradients=gradients_text(captured.programs, captured.primals, names),
                collectives="\n".join(map(collectives_text, captured.graphs)),
                gathers=gathers,
            )
        return self._plans[key]

    def gathers(self, captured: CapturedCalls, scheduled: Scheduled, rank: int) -> Mapping[int, PrefetchStep]:
        """What a rank gathers and drops, by position of the instruction."""
        sharded = {id(v) for _, v in self._ownership.named() if isinstance(v, nn.Parameter) and v.dim()}
        return steps_of(scheduled.instructions[rank], captured.primals, sharded, scheduled.kept[rank])

    def _text_of(self, graph: PipelinedGraph) -> str:
        if id(graph) not in self._graphs:
            self._graphs[id(graph)] = graph, graph_text(graph)
        return self._graphs[id(graph)][1]
