"""average_pooling: divide gradients of average pooling by the elements of a window that exist.

With ``ceil_mode`` the last window may reach beyond the padded input, and only what lies inside of it counts. Inductor's
forward knows that. Its gradient divides by the whole window if padding counts, as it does by default::

    input of 5, windows of 2      a b │ c d │ e ·       forward: (a + b) / 2, (c + d) / 2, e / 1
                                                        gradient of e: g / 2 instead of g / 1

Without padding, the gradient that leaves padding out is the same, and is right. With padding, the incoming gradient is
divided by the counts, and the gradient is asked to divide by one.

Models that need it: EfficientNet in Hugging Face Transformers, whose window is larger than any input (pytorch#198119).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import insert_call
from roundpipe_fx.ir.joint_graph import JointGraph

aten = torch.ops.aten

_GRADIENTS = {aten.avg_pool2d_backward.default: 2, aten.avg_pool3d_backward.default: 3}
"""Operators, and their dimensions in space."""


def divide_by_counts(joint: JointGraph) -> JointGraph:
    """Rewrite gradients of average pooling whose windows reach beyond the padded input. Runs before annotate."""
    for node in list(joint.computed()):
        if node.target in _GRADIENTS:
            _correct(node, _GRADIENTS[node.target])
    return joint


def _correct(node: fx.Node, dimensions: int) -> None:
    args: tuple[Any, ...] = node.args
    gradient, source, kernel, stride, padding, ceil_mode, counts_padding, divisor = args
    # A list has one item for all dimensions, or one for each; without a stride it is the kernel's size.
    sizes, steps, pads = ([*values] * (dimensions // len(values)) for values in (kernel, stride or kernel, padding))
    divides_by_counts = ceil_mode and counts_padding and divisor is None
    if not divides_by_counts or not _reaches_beyond(gradient, source, sizes, steps, pads):
        return
    if not any(pads):
        node.update_arg(6, False)
        return
    along = (
        _count_elements(node, gradient, source, dim - dimensions, *window)
        for dim, window in enumerate(zip(sizes, steps, pads, strict=True))
    )
    counts = functools.reduce(lambda one, other: insert_call(node, aten.mul.Tensor, one, other), along)
    node.args = (insert_call(node, aten.div.Tensor, gradient, counts), *args[1:7], 1)


def _reaches_beyond(gradient: fx.Node, source: fx.Node, sizes: list[int], steps: list[int], pads: list[int]) -> bool:
    """Test for a window that is not within the padded input, as far as sizes are known."""
    inputs, windows = (node.meta["val"].shape[-len(sizes) :] for node in (source, gradient))
    along = zip(inputs, windows, sizes, steps, pads, strict=True)
    return any(
        not isinstance(before, int) or not isinstance(after, int) or (after - 1) * step + size > before + 2 * pad
        for before, after, size, step, pad in along
    )


def _count_elements(
    node: fx.Node, gradient: fx.Node, source: fx.Node, dim: int, size: int, step: int, pad: int
) -> fx.Node:
    """Insert the number of elements of the padded input in each window, along a dimension in space."""
    before, after = (_insert_size(node, operand, dim) for operand in (source, gradient))
    # Window i has what follows its first element, i · step of the padded input, but no more than its size.
    numbers = insert_call(node, aten.arange.default, after, device=gradient.meta["val"].device)
    first = insert_call(node, aten.mul.Tensor, numbers, -step)
    padded = before + 2 * pad if isinstance(before, int) else insert_call(node, operator.add, before, 2 * pad)
    following = insert_call(node, aten.add.Tensor, first, padded)
    counts = insert_call(node, aten.clamp_max.default, following, size)
    return insert_call(node, aten.view.default, counts, [-1, *[1] * (-1 - dim)])


def _insert_size(before: fx.Node, tensor: fx.Node, dim: int) -> Any:
    size = tensor.meta["val"].shape[dim]
    return size if isinstance(size, int) else insert_call(before, aten.sym_size.int, tensor, dim)
