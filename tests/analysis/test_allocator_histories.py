from __future__ import annotations

from typing import Any

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.analysis import allocator_histories
from roundpipe_fx.analysis.allocator_histories import find_histories, read_current_histories
from roundpipe_fx.analysis.caching_allocator import NO_HISTORY, CachingAllocator, History, MemorySegment
from roundpipe_fx.analysis.program_events import follow_events
from roundpipe_fx.analysis.simulator import find_course_peak, find_worst_history, levels_of_course
from tests.report.test_plan_details import plan as plan

MIB = 1 << 20


def test_without_blocks_and_with_one_large_one() -> None:
    free = [[(size, True)] for size in (12 * MIB, 6 * MIB)]
    assert find_histories(torch.device("cpu"), 11 * MIB) == ()
    first, *large = find_histories(torch.device("cuda"), 11 * MIB)
    assert first == NO_HISTORY
    assert [[*history.segments[0].blocks] for history in large] == free
    assert find_histories(torch.device("cuda"), 0) == (NO_HISTORY,)


def test_where_all_is_split_off_there_is_one_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert find_histories(torch.device("cuda"), MIB) == read_current_histories(torch.device("cuda")) == ()


def _segment(**changed: Any) -> dict[str, Any]:
    blocks = [{"size": 3 * MIB, "state": "active_allocated"}, {"size": 17 * MIB, "state": "inactive"}]
    segment = {
        "device": 0,
        "stream": 7,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "address": 4,
        "blocks": blocks,
    }
    return segment | changed


def test_the_blocks_of_the_device_now_and_when_its_cache_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = [
        _segment(),
        _segment(address=1, blocks=[{"size": 20 * MIB, "state": "inactive"}]),
        _segment(stream=0),
        _segment(device=1),
        _segment(segment_pool_id=(0, 3)),
    ]
    cuda: Any = allocator_histories.torch.cuda
    for name, value in {
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda index: type("Stream", (), {"cuda_stream": 7}),
        "memory_snapshot": lambda: snapshot,
    }.items():
        monkeypatch.setattr(cuda, name, value)
    free = MemorySegment(is_small=False, blocks=((20 * MIB, True),))
    used = MemorySegment(is_small=False, blocks=((3 * MIB, False), (17 * MIB, True)))
    expected = History((free, used), has_inputs=True), History((used,), has_inputs=True)
    assert read_current_histories(torch.device("cuda:0")) == expected
    assert read_current_histories(torch.device("cuda:1")) == ()  # there is none
    assert read_current_histories(torch.device("cpu")) == ()


def test_the_worst_history_is_that_of_the_highest_peak(plan: roundpipe_fx.Plan) -> None:
    course = follow_events(*plan.programs, granularity=512)
    # The smallest block that a request fits into is whole a part of it.
    wasteful = History((MemorySegment(is_small=True, blocks=((600 << 10, False), (424 << 10, True))),))
    histories = (NO_HISTORY, wasteful)
    peaks = [find_course_peak(course, CachingAllocator(), (), history).bytes for history in histories]
    worst = find_worst_history(course, histories)
    assert find_course_peak(course, CachingAllocator(), (), worst).bytes == max(peaks)
    assert max(levels_of_course(course, CachingAllocator(), (), worst)) == max(peaks)
