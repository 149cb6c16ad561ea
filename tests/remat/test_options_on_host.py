"""What stays on a device and what leaves, at every price of the link, against all choices by exhaustion."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.remat.chain import ChainStage, ChainStageOption, SegmentChain
from roundpipe_fx.remat.options_on_host import (
    HostTier,
    SegmentOnHost,
    decisions_at_price,
    find_solutions_on_host,
)

LIMIT = 1000
"""One byte is a slot then: nothing is rounded."""


@dataclass(frozen=True)
class Choice:
    """By segment, an option and whether it leaves; with what it takes of the device, the link and time."""

    options: tuple[tuple[int, bool], ...]
    needed: int
    sent: int
    seconds: float


def option_strategy() -> st.SearchStrategy[ChainStageOption]:
    sizes = st.integers(0, 200)
    return st.builds(ChainStageOption, sizes, st.integers(0, 30).map(float), sizes, sizes)


@st.composite
def chains(draw: st.DrawFn) -> tuple[SegmentChain, list[SegmentOnHost]]:
    count = draw(st.integers(1, 4))
    stages = [
        ChainStage(
            seconds=1.0,
            forward=0,
            options=tuple(draw(st.lists(option_strategy(), min_size=1, max_size=2))),
            unsaved_options=(),
            resident=draw(st.integers(0, 50)),
            resident_forward=draw(st.integers(0, 50)),
        )
        for _ in range(count)
    ]
    segments = [
        SegmentOnHost(
            in_flight=draw(st.integers(1, 3)),
            may_leave=draw(st.booleans()),
            passing=draw(st.integers(1, 3)),
            copied=draw(st.integers(0, 1)),
            forward=draw(st.integers(0, 50)),
            backward=draw(st.integers(0, 50)),
        )
        for _ in range(count)
    ]
    return SegmentChain(tuple(stages), np.zeros((count, count), np.int64)), segments


def all_choices(chain: SegmentChain, segments: Sequence[SegmentOnHost]) -> Iterator[Choice]:
    each = [
        [(number, leaves) for number in range(len(stage.options)) for leaves in ({False, segment.may_leave})]
        for stage, segment in zip(chain.stages, segments, strict=True)
    ]
    for options in itertools.product(*each):
        held = needed = sent = 0
        seconds = 0.0
        for stage, segment, (number, leaves) in zip(chain.stages, segments, options, strict=True):
            option = stage.options[number]
            others = ((segment.passing if leaves else segment.in_flight) - 1) * option.held
            forward = option.forward + stage.resident_forward + segment.forward
            backward = option.backward + stage.resident + segment.backward
            needed = max(needed, held + others + max(forward, backward))
            held += (segment.copied if leaves else segment.in_flight) * option.held
            sent += option.held if leaves else 0
            seconds += option.seconds
        yield Choice(options, needed, sent, seconds)


prices = st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.3, 1.0, 1e6])


@settings(max_examples=150, deadline=None)
@given(chains(), prices)
def test_at_every_price_the_best_choice_within_the_limit_is_found(
    chained: tuple[SegmentChain, list[SegmentOnHost]], price: float
) -> None:
    chain, segments = chained
    every = list(all_choices(chain, segments))
    found = tuple(own.option for own in decisions_at_price(chain, segments, LIMIT, price))
    assert len(found) == len(segments)
    alike = [own for own in every if tuple(number for number, _ in own.options) == found]
    within = [own for own in every if own.needed <= LIMIT]
    if not within:
        return
    best = min(own.seconds + price * own.sent for own in within)
    assert best == min(own.seconds + price * own.sent for own in alike if own.needed <= LIMIT)


@settings(max_examples=150, deadline=None)
@given(chains(), prices)
def test_no_choice_sends_as_little_and_recomputes_less(
    chained: tuple[SegmentChain, list[SegmentOnHost]], price: float
) -> None:
    chain, segments = chained
    within = [own for own in all_choices(chain, segments) if own.needed <= LIMIT]
    if not within or not price:
        return
    found = tuple(own.option for own in decisions_at_price(chain, segments, LIMIT, price))
    own = min(
        (own for own in within if tuple(number for number, _ in own.options) == found),
        key=lambda own: own.seconds + price * own.sent,
    )
    assert not any(
        other.sent <= own.sent
        and other.seconds <= own.seconds
        and (other.sent, other.seconds) != (own.sent, own.seconds)
        for other in within
    )


def test_what_needs_least_is_found_where_nothing_fits() -> None:
    stage = ChainStage(
        seconds=1.0,
        forward=0,
        options=(ChainStageOption(90, 0.0, 90, 90), ChainStageOption(10, 5.0, 40, 60)),
        unsaved_options=(),
    )
    chain = SegmentChain((stage, stage), np.zeros((2, 2), np.int64))
    segments = [SegmentOnHost(in_flight=2, passing=2), SegmentOnHost(in_flight=2, may_leave=False)]
    decisions = decisions_at_price(chain, segments, 50, 0.0)
    assert [(own.stage, own.option) for own in decisions] == [(0, 1), (1, 1)]


def test_where_the_link_costs_more_than_recomputing_nothing_leaves() -> None:
    option = ChainStageOption(100, 0.0, 100, 100), ChainStageOption(10, 5.0, 100, 100)
    stages = tuple(ChainStage(seconds=1.0, forward=0, options=option, unsaved_options=()) for _ in range(6))
    chain = SegmentChain(stages, np.zeros((6, 6), np.int64))
    segments = [SegmentOnHost(in_flight=4, passing=2) for _ in stages]

    def recomputing(price: float) -> int:
        return sum(own.option for own in decisions_at_price(chain, segments, 1000, price))

    # 90 bytes less are sent in 5 s of recomputation; two segments have the room to save everything on the device.
    assert [recomputing(price) for price in (0.0, 0.05, 0.06, 10.0)] == [0, 0, 4, 4]


@given(chains(), st.integers(0, 600))
@settings(deadline=None)
def test_solutions_send_no_more_than_the_host_takes(drawn: tuple[SegmentChain, list[SegmentOnHost]], most: int) -> None:
    chain, _ = drawn
    last = len(chain.stages) - 1
    segments = [SegmentOnHost(may_leave=segment != last, passing=2) for segment in range(last + 1)]
    choices = [choice for choice in all_choices(chain, segments) if choice.needed <= LIMIT]
    found = find_solutions_on_host(chain, HostTier(byte_seconds=0.01, host_limit=most, carried=10**6), LIMIT)
    for solution in found:
        options = [decision.option for decision in solution.decisions]
        alike = [choice for choice in choices if [option for option, _ in choice.options] == options]
        # Of the ways to send some of these options, one needs no more of the device and of the host.
        assert any(choice.needed <= solution.bytes and choice.sent <= most for choice in alike)
        assert abs(solution.seconds - alike[0].seconds) < 1e-9
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)
    if choices and most == 600 and max(choice.sent for choice in choices) <= most:
        assert abs(found[0].seconds - min(choice.seconds for choice in choices)) < 1e-9
