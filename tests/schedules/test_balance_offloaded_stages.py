from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_fx.schedules.balance_offloaded_stages import Weights, balance_offloaded_stages, residency_bytes
from roundpipe_fx.schedules.roundpipe_partition import RoundPipePartition

layers = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=10)


def weights_of(sizes: list[int], tied: bool = False, bandwidth: float = 2.0) -> Weights:
    reads = [frozenset({number}) for number in range(len(sizes))]
    if tied:
        reads[-1] |= reads[0]
    return Weights(reads, dict(enumerate(sizes)), bandwidth)


def covered(rounds: RoundPipePartition) -> tuple[list[int], list[int]]:
    """Segments in the order of the forward, and of the backward."""
    forward = [s for first, last in (*rounds.forward, rounds.fused) for s in range(first, last + 1)]
    backward = [s for first, last in (rounds.fused, *rounds.backward) for s in reversed(range(first, last + 1))]
    return forward, backward


@given(layers, st.booleans(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_all_layers_in_order_and_within_the_limit_if_any_division_is(
    chain: list[tuple[int, int, int]], tied: bool, devices: int, microbatches: int, limit: int
) -> None:
    forward, backward, sizes = (list(column) for column in zip(*chain, strict=True))
    weights = weights_of(sizes, tied)
    found = balance_offloaded_stages(forward, backward, True, devices, microbatches, weights, limit)
    count = len(chain)
    assert covered(found) == (list(range(count)), list(reversed(range(count))))
    least = balance_offloaded_stages(forward, backward, True, devices, microbatches, weights, None)
    assert residency_bytes(found, devices, weights) <= max(limit, residency_bytes(least, devices, weights))


def test_with_room_and_a_fast_link_nothing_is_brought_or_computed_twice() -> None:
    forward, backward = [1.0] * 8, [2.0] * 8
    found = balance_offloaded_stages(forward, backward, True, 1, 4, weights_of([10] * 8, bandwidth=1e3), 10**6)
    assert found.slots == 1


def test_a_single_slot_has_all_gradients_beside_all_weights() -> None:
    weights = weights_of([10] * 8, bandwidth=1e3)
    assert residency_bytes(RoundPipePartition((), (0, 7), ()), 1, weights) == 160
    found = balance_offloaded_stages([1.0] * 8, [2.0] * 8, True, 1, 4, weights, 100)
    assert found.slots > 1 and residency_bytes(found, 1, weights) <= 100


def test_with_a_slow_link_what_comes_and_goes_is_spread_over_the_step() -> None:
    forward, backward = [1.0] * 8, [2.0] * 8
    found = balance_offloaded_stages(forward, backward, True, 1, 4, weights_of([10] * 8), 10**6)
    assert found.slots > 8


def test_as_little_as_can_be_is_two_layers_at_a_time() -> None:
    weights = weights_of([10] * 8)
    found = balance_offloaded_stages([1.0] * 8, [2.0] * 8, True, 1, 4, weights, None)
    # This layer and the next one, this one's gradient and that of the layer before.
    assert residency_bytes(found, 1, weights) == 40


def test_without_a_backward_there_are_forward_slots_alone() -> None:
    weights = weights_of([10] * 8)
    found = balance_offloaded_stages([1.0] * 8, [0.0] * 8, False, 1, 4, weights, 45)
    assert found.backward == () and covered(found)[0] == list(range(8))
    assert 20 <= residency_bytes(found, 1, weights, training=False) <= 45


def test_slots_that_last_as_long_and_take_less_are_preferred() -> None:
    """A single slot of the backward saves next to nothing, and no saved value can leave during it."""
    forward, backward = [0.01, *[1.0] * 23], [0.01, *[3.0] * 23]
    found = balance_offloaded_stages(forward, backward, False, 1, 1, weights_of([10] * 24, bandwidth=50.0), 10**6)
    assert len(found.forward) > 4 and len(found.backward) > 4
