"""Across segments: dynamic programming over a chain with a memory axis.

The problem is rotor's (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory", 2019), with several options per segment (Rockmate, Zhao
et al., ICML 2023). On reaching a stage with some memory left, either

- keep one of its options, run it and go on; its backward then recomputes what the option does not keep; or
- run on from its input to some later stage, keep only values live across into that one, run the backward of everything
  from there, and come back: rerun the forward from the input, with the same choice there.

Two tables hold the least seconds of recomputation for every amount of memory m:

- ``first[i](m)``: of stages i to the last one, n - 1, when the first forward comes to i;
- ``rerun[i, j](m)``: of stages i to j when a rerun of the forward reaches i, after which the backward of j follows.

With ``rest[k]`` for ``first[k]`` or ``rerun[k, j]``, whichever table is filled, and run(i, k) for the seconds of
running stages i to k - 1 (0 in the first forward, which is no recomputation)::

    rerun[i, i](m) = min over unsaved options o of i     o.seconds                            if o.backward <= m
    rest[i](m)     = min of
        over options o of i      o.seconds + rest[i+1](m - o.held) + run(i, i+1)              if o's peaks <= m
        over later stages k      rerun[i, k-1](m) + rest[k](m - live_across(i, k)) + run(i, k)   if running fits in m

        ──▶ i ──────────▶ k ──▶ … ──▶     run on; only x_i and what crosses into k is kept
            │             ◀──── … ───     backward of k and later: rest[k]
            i ──▶ … ──▶ k-1               come back, run forward again from x_i: rerun[i, k-1]

So a forward may run any number of times. Where other microbatches are in flight meanwhile, it can pay to keep nothing
at all of the last stages: to run on to the end and come back at once; and values saved in the first forward count for
each of the microbatches (``times``), or have a price. The optimum is over *persistent* schedules: saved values stay
until the backward that they are saved for. When the forward is rerun, the last stage before its backward need not run:
its backward recomputes what it needs just in time. With one option, which saves everything, this is rotor's problem.

Bytes are counted in slots; rounding is corrected by the simulator, which judges every plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundpipe_fx.console.progress import progress
from roundpipe_fx.remat.chain import ChainStage, Decision, SegmentChain

_MAX_ENDS = 24
"""Default maximum number of later stages to run on to that are considered at each stage, evenly spread."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Optimal recomputation for every amount of memory up to a limit.

    Attributes:
        slot: bytes per slot, the unit in which the tables count memory.
        seconds: by slots of memory, modelled seconds of recomputation; infinite where it cannot be done.
    """

    chain: SegmentChain
    slot: float
    seconds: NDArray[np.float64]
    _first: NDArray[np.float64]
    _rerun: NDArray[np.float64] | None
    _max_ends: int | None = _MAX_ENDS

    def decisions(self, slots: int) -> list[Decision]:
        """The decisions that reach ``seconds[slots]``."""
        decisions: list[Decision] = []
        tables = _Tables(self.chain, self.slot, len(self.seconds), self._rerun is not None, self._max_ends)
        tables.first, tables.rerun = self._first, self._rerun
        pending: list[tuple[int, int | None, int]] = [(0, None, slots)]
        while pending:
            stage, last, memory = pending.pop()
            decision = tables.best(stage, last, memory)
            decisions.append(decision)
            until = decision.until
            # The last stage of a rerun: nothing is left to decide behind it.
            if decision.unsaved_option is not None:
                continue
            if decision.option is not None:
                if until <= (len(self.chain.stages) - 1 if last is None else last):
                    held = self.chain.stages[stage].options[decision.option].held
                    # What is kept is gone from the memory of all that follows until its backward.
                    pending.append((until, last, memory - tables.slots(held * tables.times(last))))
            else:
                # Coming back, everything from ``until`` on is over, and its memory is free again.
                pending.append((stage, until - 1, memory))
                if until < len(self.chain.stages):
                    held = int(self.chain.live_across[stage, until])
                    pending.append((until, last, memory - tables.slots(held * tables.times(last))))
        return decisions


def solve_chain(
    chain: SegmentChain, limit: int, slots: int = 500, nested: bool = True, max_ends: int | None = _MAX_ENDS
) -> Solution:
    """Solve a chain for every amount of memory up to a limit.

    Args:
        chain: at least one stage.
        limit: bytes; the largest amount of memory that is solved for.
        slots: number of equal parts in which memory is counted.
        nested: whether the backward may come back to a stage and rerun the forward from there. Without it, solving time
            is linear in the length of the chain, else quadratic to cubic.
        max_ends: maximum number of later stages to run on to that are considered at each stage; ``None``: all.
    """
    tables = _Tables(chain, max(limit, 1) / slots, slots + 1, nested, max_ends)
    tables.solve()
    return Solution(
        chain=chain,
        slot=tables.slot,
        seconds=tables.first[0].astype(np.float64),
        _first=tables.first,
        _rerun=tables.rerun,
        _max_ends=max_ends,
    )


class _Tables:
    """The tables of the dynamic program, and the decision at a state: a stage, and the last one of its rerun."""

    def __init__(self, chain: SegmentChain, slot: float, width: int, nested: bool, max_ends: int | None) -> None:
        self.chain = chain
        self.slot = slot
        self.width = width
        self.nested = nested
        self.max_ends = max_ends
        count = len(chain.stages)
        self.first = np.full((count + 1, width), np.inf)
        self.rerun: NDArray[np.float64] | None = None
        self._memory = np.arange(width)
        self._elapsed = np.concatenate([[0.0], np.cumsum([stage.seconds for stage in chain.stages])])
        self._run = self._forward_peaks()
        self._options = [self._option_arrays(stage) for stage in chain.stages]

    def slots(self, size: int) -> int:
        return round(size / self.slot)

    def _option_arrays(self, stage: ChainStage) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Bytes held, seconds, and peak bytes of forward and backward, by option."""
        held = np.array([option.held for option in stage.options])
        cost = np.array([option.seconds for option in stage.options], dtype=np.float64)
        forward = np.array([option.forward for option in stage.options])
        return held, cost, forward, np.array([option.backward for option in stage.options])

    def times(self, last: int | None) -> int:
        """Number of live copies of saved values: in the backward, one."""
        return self.chain.times if last is None else 1

    def _in_slots(self, size: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.round(size / self.slot).astype(np.int64)

    def _forward_peaks(self) -> NDArray[np.int64]:
        """``run[i, k]``: peak bytes of running from stage i to stage k with nothing kept on the way."""
        stages = self.chain.stages
        count = len(stages)
        run = np.zeros((count, count + 1), dtype=np.int64)
        for first in range(count):
            live_across = np.concatenate([[0], self.chain.live_across[first, first + 1 : count]])
            inside = np.array([stage.forward for stage in stages[first:]], dtype=np.int64)
            # At each stage on the way: what crosses into it, and what running it takes.
            run[first, first + 1 :] = np.maximum.accumulate(live_across + inside)
        return run

    def solve(self) -> None:
        count = len(self.chain.stages)
        self.first[count] = 0.0
        if self.nested:
            self.rerun = np.full((count, count, self.width), np.inf)
            repetitions = _repetitions(self.chain)
            # Short ranges first: a range is built of shorter ones that begin in it.
            for length in progress(range(count), "nested recomputation"):
                alike = list(range(count))  # by stage, the last one from which on as many stages are the same
                for first in range(count - length - 1, -1, -1):
                    following, same = repetitions[first]
                    if same > length:
                        alike[first] = alike[following]
                    self._solve_rerun(first, first + length, alike[first])
        for stage in range(count - 1, -1, -1):
            self._solve_first(stage)

    def _solve_rerun(self, first: int, last: int, alike: int) -> None:
        """Solve one range; ``alike``: where an equal one begins that was solved before, or ``first``."""
        assert self.rerun is not None
        # Bytes resident at the end of the range count everywhere in it, and are the only difference.
        end = alike + last - first
        more = min(self.slots(self.chain.stages[last].resident - self.chain.stages[end].resident), self.width)
        if alike == first or more < 0:
            self.rerun[first, last] = self._seconds(first, last, self._memory).min(0)
        else:
            self.rerun[first, last, more:] = self.rerun[alike, end, : self.width - more]

    def _solve_first(self, stage: int) -> None:
        self.first[stage] = self._seconds(stage, None, self._memory).min(0)

    def _shift(
        self, tables: NDArray[np.float64], held: NDArray[np.int64], memory: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Tables, row by row, shifted by the slots that a decision takes."""
        where = memory[None, :] - held[:, None]
        shifted = np.take_along_axis(tables, np.maximum(where, 0), axis=1)
        # There is not enough memory for the decision at all.
        shifted[where < 0] = np.inf
        return shifted

    def _ends(self, first: int, last: int | None) -> NDArray[np.int64]:
        """Stages to run on to from ``first``."""
        end = self._last_stage(last)
        if last is None and not self.chain.alone:
            end += 1
        if self.rerun is None or first == end:
            return np.empty(0, dtype=np.int64)
        if self.max_ends is None or end - first <= self.max_ends:
            return np.arange(first + 1, end + 1)
        # The next stage is always among them: keeping only what enters a stage is the most common decision.
        return np.unique(np.r_[first + 1, np.linspace(first + 1, end, self.max_ends).astype(np.int64)])

    def _seconds(self, first: int, last: int | None, memory: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of every decision at a state, a row each, by memory. The recurrence is in the module's docstring."""
        if first == last:
            return self._backward_at_once(first, memory)
        ends = self._ends(first, last)
        rows = [self._keep_option(first, last, memory)]
        if len(ends):
            rows.append(self._rerun_later(first, last, ends, memory))
        return np.concatenate(rows)

    def _backward_at_once(self, stage: int, memory: NDArray[np.int64]) -> NDArray[np.float64]:
        """The last stage of a rerun forward, whose backward follows at once."""
        resident, options = self.chain.stages[stage].resident, self.chain.stages[stage].unsaved_options
        seconds = np.array([option.seconds for option in options])[:, None] + np.zeros(len(memory))
        return self._forbid_too_large(seconds, np.array([option.backward + resident for option in options]), memory)

    def _keep_option(self, first: int, last: int | None, memory: NDArray[np.int64]) -> NDArray[np.float64]:
        """Keep an option of the first stage and go on."""
        stage, times = self.chain.stages[first], self.times(last)
        held, seconds, forward, backward = self._options[first]
        others = held * (times - 1)  # of other microbatches
        if last is None:
            seconds = seconds + self.chain.price * held
        if first == self._last_stage(last):
            seconds_kept = seconds[:, None] + np.zeros(len(memory))
        else:
            after = np.broadcast_to(self._rest(last)[first + 1], (len(held), self.width))
            # The first forward has to run anyway; a rerun is recomputation.
            running = 0.0 if last is None else stage.seconds
            seconds_kept = self._shift(after, self._in_slots(held * times), memory) + seconds[:, None] + running
        needed = np.maximum(forward + others + self._resident(first, last), backward + others + stage.resident)
        return self._forbid_too_large(seconds_kept, needed, memory)

    def _rerun_later(
        self, first: int, last: int | None, ends: NDArray[np.int64], memory: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Run on to each of some later stages, do the backward from there, and come back."""
        assert self.rerun is not None
        times = self.times(last)
        live_across = np.append(self.chain.live_across[first], 0)[ends]
        beyond = self._shift(self._rest(last)[ends], self._in_slots(live_across * times), memory)
        seconds_back = beyond + self.rerun[first, ends - 1][:, memory]
        seconds_back += ((self.chain.price if last is None else 0.0) * live_across)[:, None]
        if last is not None:
            seconds_back += (self._elapsed[ends] - self._elapsed[first])[:, None]
        needed = self._run[first, ends] + live_across * (times - 1) + self._resident(first, last)
        return self._forbid_too_large(seconds_back, needed, memory)

    def _last_stage(self, last: int | None) -> int:
        """The last stage to be run."""
        return len(self.chain.stages) - 1 if last is None else last

    def _rest(self, last: int | None) -> NDArray[np.float64]:
        """By stage, what follows from it on."""
        return self.first if last is None or self.rerun is None else self.rerun[:, last]

    def _resident(self, first: int, last: int | None) -> int:
        """Bytes that are allocated in any case while a stage's forward runs."""
        return self.chain.stages[first].resident_forward if last is None else self.chain.stages[last].resident

    def _forbid_too_large(
        self, seconds: NDArray[np.float64], needed: NDArray[np.int64], memory: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Infinite where there are fewer bytes than needed."""
        seconds[memory[None, :] < np.round(needed / self.slot)[:, None]] = np.inf
        return seconds

    def best(self, first: int, last: int | None, memory: int) -> Decision:
        """The best decision at a state with a number of slots."""
        memory = max(memory, 0)
        columns = self._seconds(first, last, self._memory[memory : memory + 1])
        if not np.isfinite(columns).any():
            # Equal ranges were solved once, and resident bytes are rounded: slightly more may be needed than was
            # counted. The simulation, which judges every plan, rejects those that then exceed the limit.
            columns = self._seconds(first, last, self._memory[memory:])
        possible = np.flatnonzero(np.isfinite(columns).any(0))
        row = int(columns[:, possible[0] if len(possible) else 0].argmin())
        if first == last:
            return Decision(last, first, None, first, row)
        options = len(self.chain.stages[first].options)
        if row < options:
            return Decision(last, first, row, first + 1)
        return Decision(last, first, None, int(self._ends(first, last)[row - options]))


def _repetitions(chain: SegmentChain) -> list[tuple[int, int]]:
    """By stage, the next stage from which on the chain is the same for a while, and for how many stages.

    With it a chain of layers that repeat is solved in time linear in how often they do.
    """
    stages = chain.stages
    count = len(stages)
    kinds: dict[Any, int] = {}
    # Only how resident bytes grow from stage to stage matters, not how many there are.
    grows = np.diff([stage.resident for stage in stages], append=0)
    kind = np.array(
        [
            kinds.setdefault((replace(stage, resident=0, resident_forward=0), int(grows[i])), len(kinds))
            for i, stage in enumerate(stages)
        ]
    )
    same = np.zeros((count + 1, count + 1), dtype=np.int64)  # [i, j]: stages from i and j on that are equal
    for i in range(count - 1, -1, -1):
        same[i, :count] = np.where(kind == kind[i], same[i + 1, 1:] + 1, 0)
    repetitions = []
    for first in range(count - 1):
        following = first + 1 + int(same[first, first + 1 : count].argmax())
        length = int(same[first, following])
        here = chain.live_across[first : first + length, first : first + length]
        there = chain.live_across[following : following + length, following : following + length]
        _, different = np.nonzero(np.triu(here != there, 1))
        repetitions.append((following, int(different.min(initial=length))))
    return [*repetitions, (count - 1, 0)]
