"""Compilations do not map memory at each call, however deep the user's call is."""

from __future__ import annotations

import resource

from roundpipe_fx.torch_private.interpreter_stack import run_in_one_chunk

_CALLS = 500


def test_calls_map_no_memory_however_deep_the_caller_is() -> None:
    """Elsewhere, calls at the end of a chunk cost a page fault each; some of 200 depths are at an end."""

    def called(levels: int) -> None:
        if levels:
            called(levels - 1)

    def calls() -> None:
        for _ in range(_CALLS):
            called(3)

    def faults(depth: int) -> int:
        if depth:
            return faults(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run_in_one_chunk(calls)()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert max(map(faults, range(200))) < _CALLS // 5
