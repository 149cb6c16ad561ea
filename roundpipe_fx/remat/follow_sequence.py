"""Plans that follow a checkpointing sequence: segments as the layers of rotor's chain.

A sequence says for each segment, in the forward and each time it is rerun before some backward, whether everything that
its backward needs is kept, or its input, or nothing. That is a choice of kept and held values, which is simulated like
any other. Where the simulation exceeds the limit (values that skip over segments, gradients so far), another sequence
is computed for a lower limit.

Three segments that keep their inputs, where x_i is all that crosses into segment i::

    Fc_0 Fc_1 Fc_2 L Fe_2 B_2     kept from the first forward on: x_1, x_2, and what the backward of 2 needs of 2
    Fe_1 B_1                      held for the backward of 1: what it needs of 1
    Fe_0 B_0                      held for the backward of 0: what it needs of 0

    limit 100                     the sequence for 100 is simulated to peak at 112, so the next one is for 88
                                  the sequence for 88 peaks at 99, and is followed
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from roundpipe_fx.analysis.operations import Operation, OperationGraph, RecomputeRecipe
from roundpipe_fx.budget import Found, Infeasible, Result, bytes_text
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import SimulatedSchedule, make_schedule_of_choice
from roundpipe_fx.remat.schedule import RematChoice
from roundpipe_fx.remat.segment_chain import SaveOption, chain_of, storages_live_across
from roundpipe_fx.remat.sequences.algorithms import make_sequence
from roundpipe_fx.remat.sequences.layer_costs import Chain
from roundpipe_fx.remat.sequences.sequence import Backward, ForwardCheck, ForwardEnable, Sequence


@dataclass(frozen=True)
class FittedSequence:
    """A sequence, and the schedule that follows it.

    Attributes:
        candidate: the schedule, with its peak.
    """

    sequence: Sequence
    candidate: SimulatedSchedule


def chain_of_segments(graph: OperationGraph, loss_temporary: int = 0) -> Chain:
    """The segments of a graph as rotor sees them.

    Args:
        loss_temporary: bytes that are allocated between forward and backward.
    """
    return _chain(Blocks(as_in_eager_autograd(graph), reduce_peak=False), loss_temporary)[0]


def _chain(blocks: Blocks, loss_temporary: int) -> tuple[Chain, list[SaveOption]]:
    """The chain, and by segment the option that keeps everything."""
    graph = blocks.graph
    chain, save_options = chain_of(blocks)
    count = graph.segments
    boundary = [0, *(int(chain.live_across[0, i]) for i in range(1, count)), 0]
    kept = [stage.options[0] for stage in chain.stages]  # options come by seconds: the first recomputes nothing
    forward: dict[int, float] = defaultdict(float)
    for operation in graph.forward:
        forward[operation.segment] += operation.seconds
    temporary = []
    # rotor's temporary of a backward is what it takes beyond saved values and both of its boundaries (its input's
    # gradient and its own).
    for i, (stage, option) in enumerate(zip(chain.stages, kept, strict=True)):
        temporary.append(max(option.backward + stage.resident - option.held - boundary[i] - boundary[i + 1], 0))
    return Chain(
        forward=tuple(forward[i] for i in range(count)),
        backward=tuple(sum(operation.seconds for operation in graph.backward[i]) for i in range(count)),
        boundary=tuple(boundary),
        saved=(0, *(option.held for option in kept)),
        forward_temporary=tuple(max(option.forward - option.held, 0) for option in kept),
        backward_temporary=(*temporary, loss_temporary),
    ), [options[0] for options in save_options]


def fit_sequence(
    graph: OperationGraph, limit: int, slots: int, algo: str, loss_temporary: int
) -> Result[FittedSequence]:
    """The best sequence whose schedule is simulated to stay within a limit.

    Args:
        limit: bytes that the step may allocate.
        slots: number of equal parts in which memory is counted.
        algo: name of an algorithm (:data:`roundpipe_fx.remat.sequences.algorithms.ALGORITHMS`).
        loss_temporary: bytes that are allocated between forward and backward.
    """
    graph = as_in_eager_autograd(graph)
    blocks = Blocks(graph, reduce_peak=False)
    chain, save_options = _chain(blocks, loss_temporary)
    # Baselines have no limit of their own: they are one sequence each, which fits or does not.
    counted = limit if algo == "persistent" else more_than_needed(chain)
    peak = None
    while True:
        try:
            sequence = make_sequence(chain, counted, slots, algo)
        except ValueError as error:
            least = "" if peak is None else f" The tightest that was found peaks at {peak} bytes ({bytes_text(peak)})."
            text = f"a limit of {limit} bytes cannot be met: {error}{least}"
            return Infeasible(minimum=peak or 0, bottleneck=text)
        candidate = make_schedule_of_choice(blocks, _choice(graph, save_options, sequence))
        peak = candidate.peak.bytes if peak is None else min(peak, candidate.peak.bytes)
        # The sequence's own count leaves out values that skip over layers. The excess is taken off the limit, and the
        # next sequence is computed for that.
        excess = candidate.peak.bytes - limit
        if excess <= 0:
            return Found(FittedSequence(sequence, candidate))
        if algo != "persistent":
            text = f"the {algo} sequence needs {peak} bytes ({bytes_text(peak)}), and the limit is {limit}."
            return Infeasible(minimum=peak, bottleneck=text)
        # At least one slot less each time, so the search ends.
        counted -= max(excess, limit // slots)


def more_than_needed(chain: Chain) -> int:
    """Bytes that no sequence of a chain can exceed."""
    return 2 * sum((*chain.boundary, *chain.saved, *chain.forward_temporary, *chain.backward_temporary)) + 1


def _choice(graph: OperationGraph, save_options: list[SaveOption], sequence: Sequence) -> RematChoice:
    kept: set[int] = set()
    held: dict[int, set[int]] = defaultdict(set)
    pending: set[int] = set()
    before_loss = True
    for operation in sequence:
        # Both keep their input, and F_all of layer i also everything its backward needs. What runs before the loss is
        # kept from the first forward on, what runs later is held for some backward.
        if isinstance(operation, ForwardEnable | ForwardCheck):
            pending |= storages_live_across(graph, 0, operation.index)
        if isinstance(operation, ForwardEnable):
            index = operation.index
            pending |= save_options[index].saved | storages_live_across(graph, index, index + 1)
        elif isinstance(operation, Backward):
            # The first Backward after the loss ends the first forward. A later run is made for the backward that comes
            # next: what the run adds is held from that one on.
            if before_loss:
                kept, before_loss = pending, False
            else:
                held[operation.index] |= pending - kept
            pending = set()
    return RematChoice(
        frozenset(kept), {segment: frozenset(storages) for segment, storages in held.items() if storages}
    )


def as_in_eager_autograd(graph: OperationGraph) -> OperationGraph:
    """Return the graph as eager autograd runs it: no results over operands, no dropout mask drawn by itself."""
    plain = {operation: replace(operation, inplace_candidates=()) for operation in graph.forward}

    def recipe(old: RecomputeRecipe) -> RecomputeRecipe:
        return replace(old, operation=plain[old.operation])

    def block(operations: list[Operation]) -> list[Operation]:
        return [replace(operation, inplace_candidates=()) for operation in operations]

    return replace(
        graph,
        forward=tuple(plain.values()),
        backward={segment: block(operations) for segment, operations in graph.backward.items()},
        recipes={storage: recipe(old) for storage, old in graph.recipes.items()},
        mask_only={},
    )
