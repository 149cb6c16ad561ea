from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_fx.analysis.caching_allocator import CachingAllocator, MemorySegment, make_allocator
from roundpipe_fx.analysis.liveness import Event, find_peak

MIB = 1 << 20


def test_small_requests_are_rounded_up() -> None:
    allocator = CachingAllocator()
    assert [allocator.allocate(name, size) for name, size in enumerate((0, 1, 512, 513, MIB - 1, MIB))] == [
        0,
        512,
        512,
        1024,
        MIB,
        MIB,
    ]


@pytest.mark.parametrize("left, counted", [(MIB // 2, True), (MIB, True), (MIB + 512, False)])
def test_at_most_a_mebibyte_is_not_split_off_from_a_large_piece(left: int, counted: bool) -> None:
    allocator = CachingAllocator()
    size = 8 * MIB
    allocator.allocate(0, size + left)  # the first piece of a segment of 20 MiB
    allocator.allocate(1, 10 * MIB - 512)  # what follows is not free
    allocator.free(0)
    assert allocator.allocate(2, size) == size + left * counted


def test_requests_from_ten_mebibytes_have_segments_of_their_own() -> None:
    allocator = CachingAllocator()
    assert allocator.allocate(0, 11 * MIB) == 12 * MIB  # 12 MiB are asked for, and 1 MiB is not split off
    assert allocator.allocate(1, 11 * MIB - MIB // 2) == 11 * MIB - MIB // 2  # here 1.5 MiB are
    assert allocator.allocate(2, 3 * MIB) == 3 * MIB


def test_freed_neighbours_become_one_piece() -> None:
    allocator = CachingAllocator()
    sizes = [5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB]
    assert [allocator.allocate(name, size) for name, size in enumerate(sizes)] == sizes  # a segment, full
    for name in (1, 3, 2):
        allocator.free(name)
    assert allocator.allocate(4, 15 * MIB - MIB) == 15 * MIB


def test_blocks_that_were_there_before_are_handed_out_first() -> None:
    allocator = CachingAllocator()
    allocator.add([MemorySegment(is_small=False, blocks=((3 * MIB, True), (10 * MIB, False), (7 * MIB, True)))])
    assert allocator.allocate(0, 2 * MIB + MIB // 2) == 3 * MIB  # half a mebibyte is not split off
    assert allocator.allocate(1, 4 * MIB) == 4 * MIB
    assert allocator.allocate(2, 3 * MIB) == 3 * MIB  # the rest; nothing of the block in use
    allocator.free(1)
    assert allocator.allocate(3, 4 * MIB) == 4 * MIB
    assert sum(map(len, (pool.free for pool in allocator._pools.values()))) == 0


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.one_of(st.integers(0, 4 * MIB), st.integers(0, 40 * MIB))),
        max_size=60,
    )
)
def test_never_less_than_was_asked_for_and_everything_comes_back(requests: list[tuple[bool, int, int]]) -> None:
    allocator = CachingAllocator()
    held: set[int] = set()
    for is_freed, name, size in requests:
        if is_freed or name in held:
            allocator.free(name)
            held.discard(name)
        else:
            counted, rounded = allocator.allocate(name, size), -(-size // 512) * 512
            assert rounded <= counted <= rounded + (MIB if size > MIB else 0)
            held.add(name)
    for name in held:
        allocator.free(name)
    for pool in allocator._pools.values():
        assert len(pool.free) == len(pool.sizes) == pool.segments
        assert all(offset == 0 for _, offset in pool.sizes)


def test_where_sizes_are_all_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert make_allocator(torch.device("cpu")) is None
    assert make_allocator(torch.device("cuda")) is not None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512, expandable_segments: True")
    assert make_allocator(torch.device("cuda")) is None


def test_the_peak_of_what_is_counted() -> None:
    sizes = {0: 9 * MIB, 1: 10 * MIB + MIB // 2, 2: 8 * MIB}
    events = [Event("a", [], [0]), Event("b", [0], [1]), Event("c", [1], [2])]
    assert find_peak(events, sizes).bytes == 19 * MIB + MIB // 2
    # The second gets all that is left of the first's segment of 20 MiB; the third the first's piece, but for 1 MiB too
    # little to be split off.
    allocator = CachingAllocator()
    assert find_peak(events, sizes, lasting={1}, allocator=allocator).bytes == 9 * MIB + 11 * MIB
    allocator.free(1)
    assert find_peak([Event("a", [], [0], workspace=11 * MIB)], sizes, allocator=allocator).bytes == 20 * MIB
