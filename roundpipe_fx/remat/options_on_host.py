"""Options on the host: what a segment saves, and whether it stays on the device or leaves, decided together.

Every option of a segment is there twice. What stays takes bytes of the device from the segment's forward to its
backward, once for each microbatch in flight. What leaves takes bytes only while the slots run that make and read it,
and while it is copied, but time of the link, which all segments share, so its seconds have a *price* for each byte. ::

    option of a segment      held on the device           seconds
    stays                    bytes × microbatches         of recomputation
    leaves                   what is being copied         of recomputation + price × bytes

The chain with these options is solved for the memory of the device (:mod:`roundpipe_fx.remat.solve_chain`). The price
is the link's Lagrange multiplier (Everett, "Generalized Lagrange multiplier method", 1963): no other choice within the
memory sends as few bytes and recomputes less. At a price of 0 everything that helps leaves; at 1 / bandwidth a byte
costs as much as if the device waited for it. How much of the copies devices really wait for is known when the schedule
is simulated, so several prices are tried (:mod:`roundpipe_fx.planner.offload_values`). As prices find what is on a
convex hull, not all choices are found.

Of a segment everything stays or everything leaves; which values leave in the end is decided again for the emitted
stage modules (:mod:`roundpipe_fx.schedules.choose_offloads`). Nested recomputation is not considered here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, Decision, SegmentChain
from roundpipe_fx.remat.chain_search import FINE_SLOTS, levels
from roundpipe_fx.remat.solve_chain import solve_chain

_PRICES = (0.0, 0.25, 1.0, 4.0, 16.0, 64.0)
"""Multiples of the seconds in which the link carries a byte. The higher ones are for hosts with little memory."""
_AMOUNTS = 32
"""Number of amounts of memory, in a geometric sequence, for which the solution at a price is looked at."""


@dataclass(frozen=True, kw_only=True)
class HostTier:
    """The host for values of programs on one device.

    Attributes:
        byte_seconds: seconds in which the link carries a byte.
        host_limit: bytes that it has memory for.
        carried: bytes that the link carries beside the work.
    """

    byte_seconds: float
    host_limit: int
    carried: int

    @property
    def most(self) -> int:
        """Bytes that may leave in a step."""
        return min(self.host_limit, self.carried)


@dataclass(frozen=True)
class SolutionOnHost:
    """A solution of a chain in which saved values stay or leave.

    Attributes:
        bytes: memory of the device that it needs, as the chain counts it.
        seconds: of recomputation.
        decisions: as options of the chain.
    """

    bytes: int
    seconds: float
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, kw_only=True)
class SegmentOnHost:
    """Facts beside the chain of a segment whose weights, and maybe whose saved values, are on the host.

    Attributes:
        in_flight: microbatches that have begun its forward and not yet run its backward, at most, per device.
        may_leave: whether what it saves has the time to leave and to come back.
        passing: number of microbatches whose saved values of this segment are on the device while its slots run even
            though they leave: the one that runs, and those that are copied beside it. Where slots have several
            segments, those of the others count too.
        copied: number of microbatches whose saved values are on the device while the last segment runs even though
            they leave: those that are copied then.
        forward: bytes beyond what the chain counts while its forward runs, of weights for instance.
        backward: the same for its backward.
    """

    in_flight: int = 1
    may_leave: bool = True
    passing: int = 1
    copied: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class ChainOnHost:
    """A chain in which saved values stay or leave.

    Attributes:
        chain: with the options of each segment, whose bytes are those of all microbatches in flight.
        origins: by segment and option, the number of the option that it was.
        leaves: by segment and option, the bytes of a microbatch that leave.
    """

    chain: SegmentChain
    origins: tuple[tuple[int, ...], ...]
    leaves: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, chain: SegmentChain, segments: Sequence[SegmentOnHost], price: float) -> ChainOnHost:
        """The chain at a price.

        Args:
            segments: one for each stage of the chain.
            price: seconds a byte that leaves.
        """
        stages: list[ChainStage] = []
        origins: list[tuple[int, ...]] = []
        leaves: list[tuple[int, ...]] = []
        for stage, segment in zip(chain.stages, segments, strict=True):
            # Both variants of each option stand side by side; the dynamic program chooses one per segment within the
            # memory.
            staying = [_make_staying_option(option, segment.in_flight) for option in stage.options]
            leaving = [_make_offloaded_option(option, segment, price) for option in stage.options if segment.may_leave]
            stages.append(
                dataclasses.replace(
                    stage,
                    options=(*staying, *leaving),
                    resident=stage.resident + segment.backward,
                    resident_forward=stage.resident_forward + segment.forward,
                )
            )
            # Numbers lead back to the option of the original chain, whichever variant was chosen.
            origins.append((*range(len(staying)), *range(len(leaving))))
            leaves.append((*(0 for _ in staying), *(option.held for option in stage.options if segment.may_leave)))
        return cls(dataclasses.replace(chain, stages=tuple(stages)), tuple(origins), tuple(leaves))


def _make_staying_option(option: ChainStageOption, in_flight: int) -> ChainStageOption:
    """An option that every microbatch in flight keeps on the device."""
    # The chain counts one microbatch; the others hold the same bytes while this one runs.
    others = (in_flight - 1) * option.held
    return ChainStageOption(
        held=in_flight * option.held,
        seconds=option.seconds,
        forward=option.forward + others,
        backward=option.backward + others,
    )


def _make_offloaded_option(option: ChainStageOption, segment: SegmentOnHost, price: float) -> ChainStageOption:
    """An option that is on the device while its slots run, and while it is copied."""
    # Values that leave are on the device while they are copied: `passing` microbatches of them, this one included.
    others = (segment.passing - 1) * option.held
    return ChainStageOption(
        held=segment.copied * option.held,
        seconds=option.seconds + price * option.held,
        forward=option.forward + others,
        backward=option.backward + others,
    )


def decisions_at_price(
    chain: SegmentChain, segments: Sequence[SegmentOnHost], limit: int, price: float
) -> list[Decision]:
    """The options that cost the least within a limit, as options of the chain; if none are, those that need least.

    Args:
        segments: one for each stage of the chain.
        limit: bytes of the device.
        price: seconds a byte that leaves.
    """
    joined = ChainOnHost.of(chain, segments, price)
    solution = solve_chain(joined.chain, limit, FINE_SLOTS, nested=False)
    reached = levels(solution)
    # The most memory that the limit allows has the fewest seconds.
    if reached:
        decisions = solution.decisions(reached[-1])
    else:
        solution = solve_chain(joined.chain, _bytes_for_all(joined.chain), FINE_SLOTS, nested=False)
        decisions = solution.decisions(levels(solution)[0])
    return _translate_decisions(joined, decisions)


def find_solutions_on_host(chain: SegmentChain, tier: HostTier, most: int) -> list[SolutionOnHost]:
    """The solutions that no other dominates in bytes and seconds, the fewest seconds first.

    They do not depend on a budget: a plan that is taken for one is looked at for every larger one.

    Args:
        chain: of programs on one device. What the last segment saves stays: its backward follows at once.
        tier: the host.
        most: bytes of the device; solutions that need more are left out.
    """
    last = len(chain.stages) - 1
    # While a segment runs, its neighbour's values are copied.
    segments = [SegmentOnHost(may_leave=segment != last, passing=2) for segment in range(len(chain.stages))]
    solutions: list[SolutionOnHost] = []
    for price in _PRICES:
        joined = ChainOnHost.of(chain, segments, price * tier.byte_seconds)
        solution = solve_chain(joined.chain, most, FINE_SLOTS, nested=False)
        reached = levels(solution)
        if not reached:
            return []
        amounts = np.geomspace(max(reached[0], 1), max(reached[-1], 1), _AMOUNTS)
        indices = np.unique(np.searchsorted(reached, amounts.round(), side="right") - 1)
        for slots in (reached[index] for index in indices if index >= 0):
            decisions = solution.decisions(slots)
            left = sum(
                joined.leaves[decision.stage][decision.option] for decision in decisions if decision.option is not None
            )
            if left <= tier.most:
                seconds = float(solution.seconds[slots]) - price * tier.byte_seconds * left
                solutions.append(
                    SolutionOnHost(int(slots * solution.slot), seconds, tuple(_translate_decisions(joined, decisions)))
                )
    best: list[SolutionOnHost] = []
    for on_host in sorted(solutions, key=lambda on_host: (on_host.seconds, on_host.bytes)):
        if not best or on_host.bytes < best[-1].bytes:
            best.append(on_host)
    return best


def _translate_decisions(joined: ChainOnHost, decisions: Sequence[Decision]) -> list[Decision]:
    """Decisions with the options that the chain without a host has."""
    return [
        dataclasses.replace(decision, option=joined.origins[decision.stage][decision.option])
        for decision in decisions
        if decision.option is not None
    ]


def has_fitting_options(chain: SegmentChain, segments: Sequence[SegmentOnHost], limit: int) -> bool:
    """Return whether there are options within a limit: arguments as for :func:`decisions_at_price`."""
    return bool(levels(solve_chain(ChainOnHost.of(chain, segments, 0.0).chain, limit, FINE_SLOTS, nested=False)))


def _bytes_for_all(chain: SegmentChain) -> int:
    """Bytes that are enough for all options."""
    return sum(max(option.held for option in stage.options) for stage in chain.stages) + max(
        max(option.forward + stage.resident_forward, option.backward + stage.resident)
        for stage in chain.stages
        for option in stage.options
    )
