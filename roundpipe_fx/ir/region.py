"""Regions: parts of a model's ``forward`` with a budget of their own.

The context manager marks operations while the model is traced (with PyTorch's own ``torch.fx.traceback.annotate``);
the planner reads the marks. Outside compilation it does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from roundpipe_fx.budget import parse_budget
from roundpipe_fx.torch_private import passed_through

__all__ = ["budget_of_region", "memory_budget"]

_KEY = "roundpipe_fx_budget"


def memory_budget(budget: int | float | str) -> AbstractContextManager[Any]:
    """Bound what is kept, from forward to backward, of the values that are made inside.

    ::

        def forward(self, x):
            with roundpipe_fx.memory_budget(0.3):
                x = self.expensive(x)
            return self.head(x)

    Regions nest; a value counts for the innermost one that it is made in. What leaves a segment is kept where the
    plan needs it to go on from. Beside a budget of the whole step a region is a further constraint. Has no effect
    outside a model that is compiled with roundpipe_fx.

    Args:
        budget: bytes of kept values (``int`` or a size like ``"512MiB"``), or a share in [0, 1] of the way from the
            least that can be kept to all.

    Raises:
        ValueError: a number out of range, or a text that is no size; outside compilation at once, else when the
            model is planned.
        TypeError: anything else.
    """
    if not torch.compiler.is_compiling():
        parse_budget(budget)
    return torch.fx.traceback.annotate({_KEY: budget})


def budget_of_region(node: fx.Node) -> int | float | None:
    """The budget of the innermost region that a node was made in; ``None`` outside any."""
    try:
        return parse_budget((node.meta.get("custom") or {}).get(_KEY))
    except (TypeError, ValueError) as error:
        raise passed_through(error) from None
