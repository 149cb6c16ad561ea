"""Size observers: report the data-dependent sizes of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.torch_private import data_dependent_symbol

__all__ = ["ObserveSize", "size_observer"]

ObserveSize = Callable[[str, int], None]
"""Called with the name of a size and its value, or with the name of an operator and its bytes."""


def size_observer(nodes: Sequence[Any], see: ObserveSize) -> Callable[[Sequence[Any]], None] | None:
    """Make a function that reports the data-dependent sizes among results.

    Args:
        nodes: the nodes of the results, in order; constants are not nodes.
        see: called with each symbol's name and value.

    Returns:
        a function of the results; ``None`` if none of them has a data-dependent size.
    """
    places: dict[str, tuple[int, int | None]] = {}
    for index, node in enumerate(nodes):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        sizes = list(enumerate(value.shape)) if isinstance(value, torch.Tensor) else [(None, value)]
        for dim, size in sizes:
            symbol = data_dependent_symbol(size)
            if symbol is not None:
                places.setdefault(symbol, (index, dim))
    if not places:
        return None

    def see_sizes(results: Sequence[Any]) -> None:
        for symbol, (index, dim) in places.items():
            see(symbol, int(results[index] if dim is None else results[index].shape[dim]))

    return see_sizes
