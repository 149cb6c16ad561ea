"""Which pass of which checkpointed layer a thread is in.

A *layer* is one call of :func:`roundpipe_fx.checkpoint`: its function runs once in the forward (the first pass) and
once more for each backward (a recomputation). A layer that is checkpointed inside another one runs in the other's
recomputation too: the k-th layer inside is then the same layer as in the first pass, so it finds the data that it
saved, and counts as recomputed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Layer:
    """One call of a checkpointed function.

    Attributes:
        name: what error messages call the layer.
        data: the arguments of ``save_for_recompute``; ``None``: it was not called.
        inside: layers checkpointed inside it, in the order of their calls.
        begun: whether its first pass has begun.
    """

    name: str
    data: tuple[Any, ...] | None = None
    inside: list[Layer] = field(default_factory=list)
    begun: bool = False


@dataclass(eq=False)
class LayerPass:
    """A pass that is running.

    Attributes:
        recomputing: whether it is a recomputation; else it is the first pass.
        entered: how many layers inside it have been entered.
    """

    layer: Layer
    recomputing: bool
    entered: int = 0


class _Local(threading.local):
    current: LayerPass | None = None


_local = _Local()


def current_pass() -> LayerPass | None:
    """The innermost pass that runs in this thread."""
    return _local.current


def enter_layer(name: str) -> Layer:
    """The layer of a checkpointed call that begins now in this thread."""
    outer = _local.current
    if outer is None:
        return Layer(name)
    position = outer.entered
    outer.entered += 1
    if position == len(outer.layer.inside):
        outer.layer.inside.append(Layer(name))
    return outer.layer.inside[position]


@contextmanager
def running(layer: Layer) -> Iterator[None]:
    """A pass of ``layer`` runs in this thread; the first one that is entered is the first pass."""
    outer = _local.current
    recomputing = layer.begun or (outer is not None and outer.recomputing)
    layer.begun = True
    _local.current = LayerPass(layer, recomputing)
    try:
        yield
    finally:
        _local.current = outer
