"""Regions: parts of a model's ``forward`` that have their own budget.

The context manager annotates operations while the model is traced (with ``torch.fx.traceback.annotate``); the planner
reads the annotations. Outside of compilation it does nothing.
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
    """Context manager that bounds the bytes saved, from forward to backward, of the values computed inside.

    ::

        def forward(self, x):
            with roundpipe_fx.memory_budget(0.3):
                x = self.expensive(x)
            return self.head(x)

    Regions nest; a value counts for the innermost region that computes it. Values that leave a segment are saved if the
    plan continues from them. Together with a budget of the whole step, a region is an additional constraint. It has no
    effect outside of a model that is compiled with roundpipe_fx.

    Args:
        budget: bytes of saved values (``int``, or a size like ``"512MiB"``), or a share in [0, 1]: 0 saves as little
            as possible, 1 everything.

    Returns:
        the context manager.

    Raises:
        ValueError: ``budget`` is out of range, or a text that is not a size. Raised at once outside of compilation,
            else when the model is planned.
        TypeError: ``budget`` has another type.
    """
    if not torch.compiler.is_compiling():
        parse_budget(budget)
    return torch.fx.traceback.annotate({_KEY: budget})


def budget_of_region(node: fx.Node) -> int | float | None:
    """The budget of the innermost region that a node was traced in; ``None`` outside of any region."""
    try:
        return parse_budget((node.meta.get("custom") or {}).get(_KEY))
    except (TypeError, ValueError) as error:
        raise passed_through(error) from None
