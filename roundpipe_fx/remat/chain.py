"""The chain of segments: the decisions that can be made across segments, and what they cost.

A stage of the chain is a segment, whose frontier gives the options for keeping its values. On reaching a stage with
some memory left, either keep one of its options and go on, or run on to some later stage and come back. The optimum
over all decisions, for every amount of memory, is computed in :mod:`roundpipe_fx.remat.solve_chain`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ChainStageOption:
    """One option for keeping a stage's values.

    Attributes:
        held: bytes that it holds while later stages run: the values it keeps, and those live across into the next
            stage.
        seconds: of recomputation in its backward.
        forward: peak bytes while its forward runs, its input not counted.
        backward: peak bytes while its backward runs, kept values included, its input not counted.
    """

    held: int
    seconds: float
    forward: int
    backward: int


@dataclass(frozen=True, kw_only=True)
class ChainStage:
    """A segment as the chain sees it.

    Attributes:
        seconds: of rerunning its forward, as far as later stages need it.
        forward: peak bytes while its forward runs with nothing kept, its input not counted.
        options: for keeping its values.
        unsaved_options: for its backward with only its input kept: ``held`` does not count.
        resident: bytes that are allocated in its backward whatever is chosen (gradients so far, hoisted values).
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
    """Stages in order, and the bytes that are live across them.

    Attributes:
        live_across: ``live_across[i][k]``, for i < k: bytes made by stages i to k - 1 that stage k or a later one
            reads.
        times: number of live copies of values saved in the first forward: one for each microbatch in flight.
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
        # A decision is about stage `at` within a run of the forward that ends at stage `last` (None: the first
        # forward), with `held` bytes below it.
        pending: list[tuple[int, int | None, int]] = [(0, None, 0)]
        while pending:
            at, last, held = pending.pop()
            # Decisions come as a program makes them, so this stack says where the next one is made.
            decision, stage = next(following), self.stages[at]
            # In the first forward no gradients exist yet; in a run during the backward of stage `last` those so far do.
            resident = stage.resident_forward if last is None else self.stages[last].resident
            if decision.unsaved_option is not None:
                most = max(most, held + stage.unsaved_options[decision.unsaved_option].backward + stage.resident)
            elif decision.option is not None:
                option = stage.options[decision.option]
                most = max(most, held + option.forward + resident, held + option.backward + stage.resident)
                if decision.until <= (len(self.stages) - 1 if last is None else last):
                    # Going on: the next stage is decided with the option's bytes held. The backward of this stage comes
                    # when all of those are over.
                    pending.append((decision.until, last, held + option.held))
            else:
                # Running on: while stage k of the run executes, what crosses from the run into k is alive, and nothing
                # else of it.
                live_across = [0, *self.live_across[at, at + 1 :].tolist(), 0]
                run = range(at, decision.until)
                most = max(most, *(held + live_across[k - at] + self.stages[k].forward + resident for k in run))
                # Back from the later stages: the run up to there is decided again, with its end as the stage whose
                # backward follows. The stack pops the later part first.
                pending.append((at, decision.until - 1, held))
                if decision.until < len(self.stages):
                    pending.append((decision.until, last, held + live_across[decision.until - at]))
        return most

    def bytes_kept(self, decision: Decision) -> int:
        """Bytes that a decision keeps from the first forward on."""
        if decision.before is not None or decision.unsaved_option is not None:
            return 0
        if decision.option is not None:
            return self.stages[decision.stage].options[decision.option].held
        return int(self.live_across[decision.stage, decision.until]) if decision.until < len(self.stages) else 0


@dataclass(frozen=True)
class Decision:
    """One decision; decisions come in the order in which a program makes them.

    Attributes:
        before: the stage whose backward follows at once; ``None``: the decision is made in the first forward.
        stage: where it is made.
        option: the option that is kept there, if one is.
        until: the stage that is run on to; only values live across into it are kept. The stage itself: nothing is run,
            its backward follows.
        unsaved_option: the option for its backward then.
    """

    before: int | None
    stage: int
    option: int | None
    until: int
    unsaved_option: int | None = None
