"""The host as a second tier: within a budget, values of an ordinary model leave where that saves recomputation.

Plans are made as if there was no host. If the one that fits recomputes, those that recompute less are emitted with as
many values on the host as can be taken there and back beside the work (:mod:`roundpipe_fx.compiler.hidden_copies`), and
the first of them that fits then is taken, with about as many values on the host as it needs. Likewise if none fits
without the host. What plans need does not fall steadily from one to the next, so they are tried one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psutil
import torch

from roundpipe_fx.compiler.lowered import Lowered
from roundpipe_fx.planner.evaluation import Candidate, Evaluation
from roundpipe_fx.remat.choose import Chosen
from roundpipe_fx.torch_private import offload_operators

_SHARE = 0.8
"""Of the memory that the host has available, if no ``host_budget`` is given."""
TRIED = 12
"""Plans that are emitted with values on the host, at most."""
_PARTS = (8, 4, 2)
"""Of a plan's peak, such a part is sent if that suffices. What is tried must not depend on the budget: the first that
suffices has then no lower peak than what is taken for a smaller budget."""
_STAGES = 64
"""At most: each takes a call."""
_ROUNDED = 2
"""PyTorch's pinned memory has sizes that are powers of two: up to so many times what is asked for."""


def has_host(device: torch.device) -> bool:
    """Return whether values of a device can leave for the host."""
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


def stage_starts(segments: int) -> list[int]:
    """The first segment of each stage, so that copies find where to begin and to end: one a stage, or a few."""
    return [*range(0, segments, -(-segments // _STAGES))]


def least_recomputed(
    plans: Sequence[Chosen], evaluate: Callable[[Candidate], Evaluation[Lowered]], room: int
) -> Evaluation[Lowered]:
    """The first of some plans that fits with values on the host; if none does, the one that needs least.

    Args:
        plans: at least one, the least recomputation first.
        room: bytes of values that may be on the host.
    """
    tried: list[Evaluation[Lowered]] = []
    for chosen in plans:
        with_all = evaluate(Candidate(chosen, room))
        if with_all.peak > chosen.limit:
            tried.append(with_all)
            continue
        sizes = (chosen.candidate.peak.bytes // part for part in _PARTS)
        with_less = (evaluate(Candidate(chosen, sent)) if sent < room else with_all for sent in sizes)
        return next((one for one in with_less if one.peak <= chosen.limit), with_all)
    return min(tried, key=lambda one: one.peak)
