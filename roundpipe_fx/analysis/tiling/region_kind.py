"""Kinds of tile regions: which values are wide, and how wide the values may be that a region reads and returns by rows.

From which values regions of a kind are looked for, and where they end::

    kind        from                                          up to
    NARROW      each value: logits, an MLP's inner values     values with few of its elements
    BLOCK       the same                                      where the fewest bytes exist beside the loop: in place of
                                                              an MLP, all from one residual value to the next
    DIGITS      values with more digits than their operand:   values with few of its bytes: those before and behind the
                a norm's, in a model in bfloat16              norm, which have as many elements; then as a BLOCK
    ATTENTION   the output of fused attention, whose heads    the hidden state, all of which each head reads, and the
                are the rows                                  output, which is as wide
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.analysis.dimensions import ATTENTION_FORWARDS
from roundpipe_fx.ir.joint_graph import is_tensor, is_view

aten = torch.ops.aten

_LEAST_BYTES = 1 << 10
"""Smaller values are not worth a loop."""


@dataclass(frozen=True, kw_only=True)
class RegionKind:
    """A kind of regions.

    Attributes:
        counts_bytes: whether the width of a value is its bytes, and workspaces count too; else its number of elements.
        border: each value that a region reads or returns by rows has at most this share of the widest value's width.
        sums_activations: whether values of the forward, and wide ones, may be sums over tiles.
        takes_neighbours: whether operations before and behind join if fewer bytes then exist beside the loop.
    """

    counts_bytes: bool
    border: float
    sums_activations: bool
    takes_neighbours: bool = False

    def width(self, value: fx.Node, elements: int) -> int:
        """The width of a value with a number of elements."""
        return elements * int(value.meta["val"].dtype.itemsize) if self.counts_bytes and elements else elements


NARROW = RegionKind(counts_bytes=False, border=0.55, sums_activations=True)
BLOCK = RegionKind(counts_bytes=False, border=0.55, sums_activations=True, takes_neighbours=True)
DIGITS = RegionKind(counts_bytes=True, border=0.55, sums_activations=False, takes_neighbours=True)
ATTENTION = RegionKind(counts_bytes=True, border=1.0, sums_activations=False)
KINDS = (BLOCK, DIGITS, ATTENTION)
"""For budgets that narrow regions alone do not meet; in the order in which regions around values of one width are
looked for. These do not overlap."""


def kinds_around(node: fx.Node) -> Iterator[RegionKind]:
    """Yield the kinds of the regions that are looked for around a value of the forward."""
    if not may_be_widest(node):
        return
    yield NARROW
    yield BLOCK
    if _has_more_digits(node):
        yield DIGITS
    if _is_attention_output(node):
        yield ATTENTION


def may_be_widest(node: fx.Node) -> bool:
    """Return whether regions may be looked for around a value."""
    return is_tensor(node) and not is_view(node) and node.op == "call_function" and is_large(node)


def is_large(node: fx.Node) -> bool:
    """Return whether a value is worth a loop."""
    value = node.meta["val"]
    return (
        value.is_floating_point()
        and value.layout is torch.strided
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() * value.dtype.itemsize >= _LEAST_BYTES
    )


def _has_more_digits(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta["val"]
    return bool(value.is_floating_point() and value.dtype.itemsize < node.meta["val"].dtype.itemsize)


def _is_attention_output(node: fx.Node) -> bool:
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    call = node.args[0]
    return isinstance(call, fx.Node) and call.target in ATTENTION_FORWARDS
