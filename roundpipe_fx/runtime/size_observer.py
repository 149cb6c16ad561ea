"""Seen sizes: what steps show of the sizes that depend on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.torch_private import data_dependent_symbol

__all__ = ["ObserveSize", "size_observer"]

ObserveSize = Callable[[str, int], None]
"""Told the name of a size, or of an operator, and how large it was or how many bytes it took."""


def size_observer(nodes: Sequence[Any], see: ObserveSize) -> Callable[[Sequence[Any]], None] | None:
    """What notes the data-dependent sizes among results; ``None`` if there are none.

    Args:
        nodes: that the results are of, in order; what is no node is a constant.
        see: told each symbol's name and value.
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
