"""Sequences for a chain: the optimal persistent one, and baselines to compare it with.

A sequence is *persistent* if saved values stay until the backward that they are saved for. Among these the fastest
within a memory limit is found by the dynamic program that every plan of this project uses
(:mod:`roundpipe_fx.remat.solve_chain`), with one option per layer. Memory is counted in slots, rounded up, so the
result fits; with fewer bytes than slots it is exact.

The published recurrence does not count the gradient that a backward computes in that backward's peak; here it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, Decision
from roundpipe_fx.remat.chain import SegmentChain as SegmentChain
from roundpipe_fx.remat.sequences.layer_costs import Chain
from roundpipe_fx.remat.sequences.sequence import (
    Backward,
    ForwardCheck,
    ForwardEnable,
    ForwardNograd,
    Loss,
    Sequence,
    SequenceOperation,
)
from roundpipe_fx.remat.solve_chain import solve_chain


def persistent(chain: Chain, limit: int, slots: int = 500) -> Sequence:
    """The fastest persistent sequence whose peak is within a limit.

    Args:
        limit: bytes, the chain's input included.
        slots: number of equal parts in which memory is counted.

    Raises:
        ValueError: no sequence fits.
    """
    if limit <= 0:
        raise ValueError(f"a memory limit of {limit} bytes is not positive.")
    slot = limit / slots if limit > slots else 1.0
    counted = chain.in_slots(slot)
    # The chain's input lives for the whole step, and is not part of the dynamic program.
    memory = int(limit / slot) - counted.boundary[0]
    if memory > 0:
        solution = solve_chain(_as_segment_chain(counted), memory, memory, max_ends=None)
        if np.isfinite(solution.seconds[memory]):
            operations = _operations(solution.decisions(memory), chain.length)
            return Sequence(tuple(operations), "persistent", limit)
    raise ValueError(f"no persistent sequence of this chain of {chain.length} layers fits {limit} bytes.")


def _as_segment_chain(chain: Chain) -> SegmentChain:
    """The chain as the planner takes it: the loss is one more stage, and incoming gradients are resident."""
    n = chain.length
    stages = []
    # One option per layer: keep x̄_{i+1}. Keeping only the input is `unsaved_options`; then the layer runs once more.
    for i in range(n):
        kept = chain.saved[i + 1]
        forward = kept + chain.forward_temporary[i]
        backward = kept + chain.boundary[i] + chain.backward_temporary[i]
        stages.append(
            ChainStage(
                seconds=chain.forward[i],
                forward=chain.boundary[i + 1] + chain.forward_temporary[i],
                options=(ChainStageOption(kept, 0.0, forward, backward),),
                unsaved_options=(ChainStageOption(0, chain.forward[i], 0, max(forward, backward)),),
                resident=chain.boundary[i + 1],
            )
        )
    loss = ChainStageOption(0, 0.0, 0, chain.boundary[n] + chain.backward_temporary[n])
    stages.append(ChainStage(seconds=0.0, forward=0, options=(loss,), unsaved_options=(loss,)))
    live_across = np.zeros((n + 1, n + 1), dtype=np.int64)
    for i in range(n + 1):
        # live_across[i, k] is x_k alone: a chain has no skips.
        live_across[i, i + 1 :] = chain.boundary[i + 1 :]
    return SegmentChain(tuple(stages), live_across)


def _operations(decisions: list[Decision], n: int) -> list[SequenceOperation]:
    """Operations of decisions, which come in the order in which a program makes them."""
    operations: list[SequenceOperation] = []
    coming = iter(decisions)
    pending: list[tuple[int, int] | Backward] = [(0, n)]
    while pending:
        item = pending.pop()
        # A stack of what is still to come: backwards of kept layers below, and the part of the chain that is decided
        # next on top.
        if isinstance(item, Backward):
            operations.append(item)
            continue
        decision = next(coming)
        stage, last = decision.stage, item[1]
        if stage == n:
            operations.append(Loss())
        elif decision.unsaved_option is not None:
            operations += [ForwardEnable(stage), Backward(stage)]
        elif decision.option is not None:
            operations.append(ForwardEnable(stage))
            pending += [Backward(stage), (stage + 1, last)]
        else:
            # F_ck at the first layer of the run keeps its input; the layers behind it keep nothing.
            operations.append(ForwardCheck(stage))
            operations += [ForwardNograd(index) for index in range(stage + 1, decision.until)]
            pending += [(stage, decision.until - 1), (decision.until, last)]
    return operations


def no_checkpoint(chain: Chain, limit: int | None = None, slots: int = 500) -> Sequence:
    """Everything is kept; nothing runs twice."""
    n = chain.length
    forward = [ForwardEnable(i) for i in range(n)]
    return Sequence((*forward, Loss(), *(Backward(i) for i in reversed(range(n)))), "no-checkpoint", limit)


def every_segment(chain: Chain, limit: int | None = None, slots: int = 500) -> Sequence:
    """Each layer saves its input and is recomputed: ``torch.utils.checkpoint`` around every one."""
    return _checkpoint_segments(chain.length, 1, chain.length, "every-segment", limit)


def periodic(chain: Chain, limit: int | None = None, slots: int = 500) -> Sequence:
    """√n segments save their input and are recomputed, all but the last (Chen et al., 2016)."""
    # √n segments of √n layers: 2√n saved inputs at the peak, at the price of one more forward.
    count = max(round(math.sqrt(chain.length)), 1)
    return _checkpoint_segments(chain.length, chain.length // count, count - 1, "periodic", limit)


def _checkpoint_segments(n: int, size: int, count: int, name: str, limit: int | None) -> Sequence:
    """The first ``count`` segments of equal size are recomputed, the others are saved."""
    operations: list[SequenceOperation] = []
    starts = [size * k for k in range(count)]
    for start in starts:
        operations += [ForwardCheck(start), *(ForwardNograd(i) for i in range(start + 1, start + size))]
    rest = range(size * count, n)
    operations += [*map(ForwardEnable, rest), Loss(), *map(Backward, reversed(rest))]
    for start in reversed(starts):
        layers = range(start, start + size)
        operations += [*map(ForwardEnable, layers), *map(Backward, reversed(layers))]
    return Sequence(tuple(operations), name, limit)


ALGORITHMS: dict[str, Callable[..., Sequence]] = {
    "persistent": persistent,
    "no-checkpoint": no_checkpoint,
    "every-segment": every_segment,
    "periodic": periodic,
}
"""By name: ``(chain, limit in bytes, slots) -> Sequence``."""


def make_sequence(chain: Chain, limit: int, slots: int, algo: str) -> Sequence:
    """A sequence within a limit.

    Raises:
        ValueError: an unknown algorithm, or its sequence does not fit; says what it needs.
    """
    if algo not in ALGORITHMS:
        raise ValueError(f"algo={algo!r}: valid values are {', '.join(map(repr, ALGORITHMS))}.")
    sequence = ALGORITHMS[algo](chain, limit, slots)
    peak = sequence.peak(chain)
    if peak > limit:
        raise ValueError(f"the {algo} sequence of this chain needs {peak} bytes, and the limit is {limit}.")
    return sequence
