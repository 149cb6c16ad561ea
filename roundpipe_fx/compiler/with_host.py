"""The host as a second tier: within a budget, values of an ordinary model leave where that saves recomputation.

Plans are made as if there was no host. If the one that fits recomputes, those that recompute less are emitted with as
many values on the host as can be taken there and back beside the work (:mod:`roundpipe_fx.compiler.hidden_copies`), and
the one that recomputes least of those that fit then is taken, with fewer values on the host if these suffice. Likewise
if none fits without the host. What plans need falls from one to the next, so few are emitted: they are bisected.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import psutil
import torch

from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.torch_private import offload_operators

__all__ = ["SentEmitter", "has_host", "host_room", "least_recomputed"]

SentEmitter = Callable[[Chosen, int], Lowered]
"""Emits a plan with so many bytes of values on the host, if as many have the time to leave."""

_SHARE = 0.8
"""Of the memory that the host has available, if no ``host_budget`` is given."""
_PARTS = (8, 4, 2)
"""Of a plan's peak, such a part is sent if that suffices. What is tried must not depend on the budget: the first that
suffices has then no lower peak than what is taken for a smaller budget."""
_ROUNDED = 2
"""PyTorch's pinned memory has sizes that are powers of two: up to so many times what is asked for."""


def has_host(device: torch.device) -> bool:
    """Whether values of a device can leave for the host."""
    return device.type != "cpu" and offload_operators() is not None


def host_room(host_budget: int | None, on_paper: bool) -> int:
    """Bytes of values that may be on the host.

    Args:
        host_budget: the user's; ``None``: a share of what the host has available.
        on_paper: whether the plan is for another machine, whose host has room for everything.
    """
    if host_budget is None and on_paper:
        return torch.iinfo(torch.int64).max
    budget = int(_SHARE * psutil.virtual_memory().available) if host_budget is None else host_budget
    return budget // _ROUNDED


def least_recomputed(plans: Sequence[Chosen], emitted: SentEmitter, room: int) -> tuple[Lowered, int]:
    """The plan that recomputes least of those that fit with values on the host; if none does, the last one.

    Args:
        plans: the least recomputation first.
        emitted: emits one.
        room: bytes of values that may be on the host.

    Returns:
        the plan and its number.
    """
    known: dict[int, Lowered] = {}

    def fits(place: int) -> bool:
        known[place] = emitted(plans[place], room)
        return known[place].peak.bytes <= plans[place].limit

    place = bisect_left(range(len(plans)), True, key=fits)
    if place == len(plans):
        return known[place - 1], place - 1
    chosen = plans[place]
    for part in _PARTS:
        sent = chosen.candidate.peak.bytes // part
        if sent < room:
            lowered = emitted(chosen, sent)
            if lowered.peak.bytes <= chosen.limit:
                return lowered, place
    return known[place], place
