"""Attempts whose values have room on the host."""

from __future__ import annotations

from collections.abc import Sequence

from roundpipe_fx.pipeline.host_memory import host_memory_of
from roundpipe_fx.pipeline.settings import Pipelining
from roundpipe_fx.planner.attempt import Attempt

__all__ = ["with_room_on_host", "within_host"]


def with_room_on_host(attempts: Sequence[Attempt], pipelining: Pipelining, budget: int | None) -> list[Attempt]:
    """The attempts whose values have room on the host. An offloaded model's weights need it in any case: what they have
    with their values is compared in :func:`within_host`."""
    if pipelining.offloaded or budget is None:
        return list(attempts)
    return [
        attempt
        for attempt in attempts
        if attempt.pipeline.offload is None
        or host_memory_of(attempt.pipeline, attempt.timing, pipelining).total <= budget
    ]


def within_host(fitting: Sequence[Attempt], pipelining: Pipelining, budget: int | None) -> list[Attempt]:
    """The attempts that the host has the memory for; if there is none, the one that needs least of it."""
    needed = [host_memory_of(attempt.pipeline, attempt.timing, pipelining).total for attempt in fitting]
    if budget is None or not fitting:
        return list(fitting)
    within = [attempt for attempt, bytes_needed in zip(fitting, needed, strict=True) if bytes_needed <= budget]
    return within or [fitting[needed.index(min(needed))]]
