"""An operator that keeps random numbers without users alive from Dynamo's graph to the first passes."""

from __future__ import annotations

import torch
from torch import fx

__all__ = ["RESOLVED_RANDOM_BRANCH"]


@torch.library.custom_op("roundpipe_fx::resolved_random_branch", mutates_args=())
def _resolved_random_branch(number: torch.Tensor) -> None:
    """Reads a random number and does nothing."""


@_resolved_random_branch.register_fake
def _(number: torch.Tensor) -> None:
    return None


RESOLVED_RANDOM_BRANCH = torch.ops.roundpipe_fx.resolved_random_branch.default
fx.node.has_side_effect(RESOLVED_RANDOM_BRANCH)  # it is there not to be dropped
