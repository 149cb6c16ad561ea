"""Calls alive: pipelined calls that wait for their backward while another one runs.

A pipeline's plan knows the microbatches of one call. If a step makes several calls before a backward, each device holds
the saved values of all of them, which no plan has counted. The user is warned once.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.remat.learned_steps import StepBudgetWarning

__all__ = ["CallsAlive"]


class CallsAlive:
    """The calls of one pipeline whose backward may still come."""

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned = False

    def add(self, call: Any, budget: int | None) -> None:
        """Record a call.

        Args:
            call: alive until its backward has begun (``call.values`` is ``None``) or nothing refers to it.
            budget: bytes that each device may take for one; ``None``: there is no limit.
        """
        self._calls.add(call)
        alive = sum(1 for alive_call in self._calls if alive_call.values is not None)
        if alive > 1 and budget is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"roundpipe_fx: {alive} calls of a pipelined model were alive at once, before a backward. The "
                f"memory_budget of {budget} bytes ({bytes_text(budget)}) a device was planned for one call with all "
                "its microbatches, and does not hold for several together. Make them one batch, go backward after "
                "each, or give a smaller budget.",
                StepBudgetWarning,
                stacklevel=2,
            )
