"""Across segments: dynamic programming over a chain with a memory axis.

The problem is rotor's (Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova, "Optimal checkpointing for heterogeneous
chains: how to train deep neural networks with limited memory", 2019), with several options a segment (Rockmate, Zhao
et al., ICML 2023). A stage of the chain is a segment. Coming to a stage with so much memory left, either

- keep one of its options, run it and go on; its backward then makes again what the option does not keep; or
- run on from its input to some later stage, keep only what crosses into that one, do the backward of all from
  there, and come back: run forward again from the input, with the same question asked anew.

Where other microbatches are in flight meanwhile, it can be worth to keep nothing at all of the last stages: to run on
to the end and come back at once.

So a forward may run any number of times. The optimum is over *persistent* schedules: what is kept stays until the
backward that it is kept for. In a repetition the last stage before its backward runs need not be run: its backward
makes just in time what it needs. With one option, which keeps all, this is rotor's problem.

Bytes are counted in slots; what is rounded is put right by the simulator, which judges every plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from roundpipe_fx.remat.progress import progress

__all__ = ["ChainStage", "ChainStageOption", "Decision", "SegmentChain", "Solution", "solve_chain"]

_MOST_PLACES = 24
"""From one place at most so many later ones are looked at to come back from, evenly spread, unless told otherwise."""


@dataclass(frozen=True)
class ChainStageOption:
    """One way to keep a stage's values.

    Attributes:
        held: bytes that it holds while later stages run: what it keeps, with what crosses into the next stage.
        seconds: of recomputation in its backward.
        forward: peak bytes while its forward runs, its input not counted.
        backward: peak bytes while its backward runs, its input not counted, what it kept included.
    """

    held: int
    seconds: float
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True)
class ChainStage:
    """A segment as the chain sees it.

    Attributes:
        seconds: of running its forward again, as far as later stages need it.
        forward: peak bytes while its forward runs with nothing kept, its input not counted.
        options: ways to keep its values.
        unsaved_options: ways of its backward with nothing kept but its input: ``held`` does not count.
        resident: bytes that lie there in its backward whatever is chosen (gradients so far, hoisted values).
        resident_forward: the same in its first forward.
    """

    seconds: float
    forward: int
    options: tuple[ChainStageOption, ...]
    unsaved_options: tuple[ChainStageOption, ...]
    resident: int = 0
    resident_forward: int = 0


@dataclass(frozen=True)
class SegmentChain:
    """Links in order, and what crosses.

    Attributes:
        stages: first to last.
        live_across: ``live_across[i][k]``, for i < k: bytes made by stages i to k - 1 that stage k or a later one
            reads.
        times: so often is there what the first forward keeps: for each microbatch in flight.
        price: seconds a byte that the first forward keeps, added to the cost.
        alone: whether nothing runs between the end of the forward and the beginning of the backward.
    """

    stages: tuple[ChainStage, ...]
    live_across: NDArray[np.int64]
    times: int = 1
    price: float = 0.0
    alone: bool = True

    def part(self, first: int, end: int, alone: bool) -> SegmentChain:
        """The stages from ``first`` up to ``end`` as a chain of their own."""
        return SegmentChain(self.stages[first:end], self.live_across[first:end, first:end], alone=alone)

    def needed(self, decisions: Iterable[Decision]) -> int:
        """Bytes that following the decisions takes, for one microbatch."""
        most = 0
        following = iter(decisions)
        pending: list[tuple[int, int | None, int]] = [(0, None, 0)]
        while pending:
            at, last, held = pending.pop()
            decision, stage = next(following), self.stages[at]
            resident = stage.resident_forward if last is None else self.stages[last].resident
            if decision.unsaved_option is not None:
                most = max(most, held + stage.unsaved_options[decision.unsaved_option].backward + stage.resident)
            elif decision.option is not None:
                option = stage.options[decision.option]
                most = max(most, held + option.forward + resident, held + option.backward + stage.resident)
                if decision.until <= (len(self.stages) - 1 if last is None else last):
                    pending.append((decision.until, last, held + option.held))
            else:
                live_across = [0, *self.live_across[at, at + 1 :].tolist(), 0]
                run = range(at, decision.until)
                most = max(most, *(held + live_across[k - at] + self.stages[k].forward + resident for k in run))
                pending.append((at, decision.until - 1, held))
                if decision.until < len(self.stages):
                    pending.append((decision.until, last, held + live_across[decision.until - at]))
        return most

    def kept_at(self, decision: Decision) -> int:
        """Bytes that a decision keeps from the first forward on."""
        if decision.before is not None or decision.unsaved_option is not None:
            return 0
        if decision.option is not None:
            return self.stages[decision.stage].options[decision.option].held
        return int(self.live_across[decision.stage, decision.until]) if decision.until < len(self.stages) else 0


@dataclass(frozen=True)
class Decision:
    """One decision, in the order in which a program meets them.

    Attributes:
        before: the stage whose backward follows at once; ``None``: taken in the first forward.
        stage: where it is taken.
        option: the option that is kept there, if one is.
        until: the stage that is run on to; only what crosses into it is kept. The stage itself: nothing is run, its
            backward follows.
        unsaved_option: the way of its backward then.
    """

    before: int | None
    stage: int
    option: int | None
    until: int
    unsaved_option: int | None = None


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Optimal recomputation for every amount of memory up to a limit.

    Attributes:
        slot: bytes a slot.
        seconds: by slots of memory, modelled seconds of recomputation; infinite where it cannot be done.
    """

    chain: SegmentChain
    slot: float
    seconds: NDArray[np.float64]
    _first: NDArray[np.float64]
    _again: NDArray[np.float64] | None
    _places: int | None = _MOST_PLACES

    def decisions(self, slots: int) -> list[Decision]:
        """The decisions that reach ``seconds[slots]``."""
        found: list[Decision] = []
        tables = _Tables(self.chain, self.slot, len(self.seconds), self._again is not None, self._places)
        tables.first, tables.again = self._first, self._again
        pending: list[tuple[int, int | None, int]] = [(0, None, slots)]
        while pending:
            stage, last, memory = pending.pop()
            decision = tables.best(stage, last, memory)
            found.append(decision)
            until = decision.until
            if decision.unsaved_option is not None:
                continue
            if decision.option is not None:
                if until <= (len(self.chain.stages) - 1 if last is None else last):
                    held = self.chain.stages[stage].options[decision.option].held
                    pending.append((until, last, memory - tables.slots(held * tables.times(last))))
            else:
                pending.append((stage, until - 1, memory))
                if until < len(self.chain.stages):
                    held = int(self.chain.live_across[stage, until])
                    pending.append((until, last, memory - tables.slots(held * tables.times(last))))
        return found


def solve_chain(
    chain: SegmentChain, limit: int, slots: int = 500, nested: bool = True, places: int | None = _MOST_PLACES
) -> Solution:
    """Solve a chain for every amount of memory up to a limit.

    Args:
        chain: at least one stage.
        limit: bytes.
        slots: how finely memory is counted.
        nested: whether the backward may come back to a place and run forward again from there. Without it time is
            linear in the length of the chain, else quadratic to cubic.
        places: from one place at most so many later ones are looked at to come back from; ``None``: all.
    """
    tables = _Tables(chain, max(limit, 1) / slots, slots + 1, nested, places)
    tables.solve()
    return Solution(
        chain=chain,
        slot=tables.slot,
        seconds=tables.first[0].astype(np.float64),
        _first=tables.first,
        _again=tables.again,
        _places=places,
    )


def _repetitions(chain: SegmentChain) -> list[tuple[int, int]]:
    """By stage, the next stage from which on the chain is the same for a while, and for how many stages.

    With it a chain of layers that repeat is solved in time linear in how often they do.
    """
    stages = chain.stages
    count = len(stages)
    kinds: dict[Any, int] = {}
    # Only how what stands grows from stage to stage matters, not how much there is.
    grows = np.diff([stage.resident for stage in stages], append=0)
    kind = np.array(
        [
            kinds.setdefault((replace(stage, resident=0, resident_forward=0), int(grows[i])), len(kinds))
            for i, stage in enumerate(stages)
        ]
    )
    same = np.zeros((count + 1, count + 1), dtype=np.int64)  # [i, j]: from stages i and j on, so many are of a kind
    for i in range(count - 1, -1, -1):
        same[i, :count] = np.where(kind == kind[i], same[i + 1, 1:] + 1, 0)
    found = []
    for first in range(count - 1):
        following = first + 1 + int(same[first, first + 1 : count].argmax())
        length = int(same[first, following])
        here = chain.live_across[first : first + length, first : first + length]
        there = chain.live_across[following : following + length, following : following + length]
        _, different = np.nonzero(np.triu(here != there, 1))
        found.append((following, int(different.min(initial=length))))
    return [*found, (count - 1, 0)]


class _Tables:
    def __init__(self, chain: SegmentChain, slot: float, width: int, nested: bool, places: int | None) -> None:
        self.chain = chain
        self.slot = slot
        self.width = width
        self.nested = nested
        self.most_places = places
        count = len(chain.stages)
        self.first = np.full((count + 1, width), np.inf)
        self.again: NDArray[np.float64] | None = None
        self._memory = np.arange(width)
        self._elapsed = np.concatenate([[0.0], np.cumsum([stage.seconds for stage in chain.stages])])
        self._run = self._running()
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
        """How often what is kept is there: in the backward once."""
        return self.chain.times if last is None else 1

    def _held(self, size: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.round(size / self.slot).astype(np.int64)

    def _running(self) -> NDArray[np.int64]:
        """``run[i, k]``: peak bytes of running from stage i to stage k with nothing kept on the way."""
        stages = self.chain.stages
        count = len(stages)
        run = np.zeros((count, count + 1), dtype=np.int64)
        for first in range(count):
            live_across = np.concatenate([[0], self.chain.live_across[first, first + 1 : count]])
            inside = np.array([stage.forward for stage in stages[first:]], dtype=np.int64)
            run[first, first + 1 :] = np.maximum.accumulate(live_across + inside)
        return run

    def solve(self) -> None:
        count = len(self.chain.stages)
        self.first[count] = 0.0
        if self.nested:
            self.again = np.full((count, count, self.width), np.inf)
            repetitions = _repetitions(self.chain)
            for length in progress(range(count), "nested recomputation"):
                alike = list(range(count))  # by stage, the last one from which on so many stages are the same
                for first in range(count - length - 1, -1, -1):
                    following, same = repetitions[first]
                    if same > length:
                        alike[first] = alike[following]
                    self._solve_again(first, first + length, alike[first])
        for stage in range(count - 1, -1, -1):
            self._solve_first(stage)

    def _solve_again(self, first: int, last: int, alike: int) -> None:
        """Solve one range; ``alike``: where an equal one begins that was solved before, or ``first``."""
        assert self.again is not None
        # What stands at the end of the range counts everywhere in it, and is all that is different.
        end = alike + last - first
        more = min(self.slots(self.chain.stages[last].resident - self.chain.stages[end].resident), self.width)
        if alike == first or more < 0:
            self.again[first, last] = self._seconds(first, last, self._memory).min(0)
        else:
            self.again[first, last, more:] = self.again[alike, end, : self.width - more]

    def _solve_first(self, stage: int) -> None:
        self.first[stage] = self._seconds(stage, None, self._memory).min(0)

    def _shifted(
        self, tables: NDArray[np.float64], held: NDArray[np.int64], memory: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Row by row, tables at so many slots less memory."""
        where = memory[None, :] - held[:, None]
        found = np.take_along_axis(tables, np.maximum(where, 0), axis=1)
        found[where < 0] = np.inf
        return found

    def _places(self, first: int, last: int | None) -> NDArray[np.int64]:
        """Links to run on to from ``first``."""
        end = len(self.chain.stages) - 1 if last is None else last
        if last is None and not self.chain.alone:
            end += 1
        if self.again is None or first == end:
            return np.empty(0, dtype=np.int64)
        if self.most_places is None or end - first <= self.most_places:
            return np.arange(first + 1, end + 1)
        return np.unique(np.r_[first + 1, np.linspace(first + 1, end, self.most_places).astype(np.int64)])

    def _seconds(self, first: int, last: int | None, memory: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of every decision at a place, a row each, by memory."""
        stages = self.chain.stages
        stage = stages[first]
        if first == last:
            seconds = np.array([option.seconds for option in stage.unsaved_options])[:, None] + np.zeros(len(memory))
            needed = np.array([option.backward + stage.resident for option in stage.unsaved_options])
            return self._possible(seconds, needed, memory)
        end = len(stages) - 1 if last is None else last
        rest = self.first if last is None else self.again[:, last] if self.again is not None else self.first
        resident = stage.resident_forward if last is None else stages[last].resident
        price, times = self.chain.price if last is None else 0.0, self.times(last)
        held, cost, forward, backward = self._options[first]
        others = held * (times - 1)
        forward, backward, cost = forward + others, backward + others, cost + price * held
        if first == end:
            seconds = cost[:, None] + np.zeros(len(memory))
        else:
            after = np.broadcast_to(rest[first + 1], (len(held), self.width))
            seconds = (
                self._shifted(after, self._held(held * times), memory)
                + cost[:, None]
                + (0.0 if last is None else stage.seconds)
            )
        rows = [self._possible(seconds, np.maximum(forward + resident, backward + stage.resident), memory)]
        places = self._places(first, last)
        if len(places):
            assert self.again is not None
            live_across = np.append(self.chain.live_across[first], 0)[places]
            seconds = (
                self._shifted(rest[places], self._held(live_across * times), memory)
                + self.again[first, places - 1][:, memory]
            )
            seconds += (price * live_across)[:, None]
            if last is not None:
                seconds += (self._elapsed[places] - self._elapsed[first])[:, None]
            rows.append(
                self._possible(seconds, self._run[first, places] + live_across * (times - 1) + resident, memory)
            )
        return np.concatenate(rows)

    def _possible(
        self, seconds: NDArray[np.float64], needed: NDArray[np.int64], memory: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Infinite where there are fewer bytes than needed."""
        seconds[memory[None, :] < np.round(needed / self.slot)[:, None]] = np.inf
        return seconds

    def best(self, first: int, last: int | None, memory: int) -> Decision:
        """The best decision at a place with so many slots."""
        memory = max(memory, 0)
        columns = self._seconds(first, last, self._memory[memory : memory + 1])
        if not np.isfinite(columns).any():
            # Equal ranges were solved once, and what stands is rounded: a little more may be needed than was counted.
            # What then exceeds the limit is judged by simulation, as every plan is.
            columns = self._seconds(first, last, self._memory[memory:])
        possible = np.flatnonzero(np.isfinite(columns).any(0))
        row = int(columns[:, possible[0] if len(possible) else 0].argmin())
        if first == last:
            return Decision(last, first, None, first, row)
        options = len(self.chain.stages[first].options)
        if row < options:
            return Decision(last, first, row, first + 1)
        return Decision(last, first, None, int(self._places(first, last)[row - options]))
