"""interpolation: indexing that repeats nearest neighbours becomes an interpolation kernel.

PyTorch traces nearest-neighbour ``interpolate`` as indexing by tables, and its gradient as additions at the indexed
positions, which the CPU carries out one by one on one core. The kernels are bitwise equal, need no tables and use all
cores. A table is computed from constants, so it is evaluated here and compared with the neighbours that the kernel
reads; only if they agree, and the result has the same strides, is the indexing replaced.

Models that need it: U-Nets (``unet`` in ``benchmarks/models.py``), and in Hugging Face Transformers feature pyramids
(DETR, MaskFormer, RT-DETR) and image decoders (Emu3, Janus, Swin2SR).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import insert_call, replace_by
from roundpipe_fx.ir.joint_graph import JointGraph, is_seeded

aten = torch.ops.aten

# By number of dimensions in space: the kernel and that of its gradient.
_KERNELS = {
    1: (
        (aten.upsample_nearest1d.default, aten.upsample_nearest1d_backward.default),
        (aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact1d_backward.default),
    ),
    2: (
        (aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default),
        (aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default),
    ),
    3: (
        (aten.upsample_nearest3d.default, aten.upsample_nearest3d_backward.default),
        (aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d_backward.default),
    ),
}
_LONGEST = 16
"""Maximum number of operations that compute a table."""


def restore_interpolation(joint: JointGraph) -> JointGraph:
    """Replace indexing by nearest neighbours, and its gradient, on the CPU. Runs before annotate."""
    replaced = False
    for node in list(joint.computed()):
        if node.target is aten._unsafe_index.Tensor:
            replaced |= _replace_indexing(node)
        elif node.target is aten._unsafe_index_put.default:
            replaced |= _replace_gradient(node)
    if replaced:
        joint.drop_unread()
    return joint


def _replace_indexing(node: fx.Node) -> bool:
    source, indices = node.args
    assert isinstance(source, fx.Node)
    whole, repeated = source.meta["val"], node.meta["val"]
    kernels = _kernels(indices, whole, repeated)
    return kernels is not None and _replace(node, kernels[0], source, list(repeated.shape[2:]))


def _replace_gradient(node: fx.Node) -> bool:
    zeros, indices, gradient, *accumulate = node.args
    if accumulate != [True] or not isinstance(zeros, fx.Node) or not isinstance(gradient, fx.Node):
        return False
    whole, repeated = zeros.meta["val"], gradient.meta["val"]
    if zeros.target not in (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default):
        return False
    if whole.dtype != repeated.dtype:
        return False
    kernels = _kernels(indices, whole, repeated)
    sizes = list(repeated.shape[2:]), list(whole.shape)
    return kernels is not None and _replace(node, kernels[1], gradient, *sizes)


def _replace(node: fx.Node, kernel: Any, *args: Any) -> bool:
    kernel_call = insert_call(node, kernel, *args)
    if kernel_call.meta["val"].stride() != node.meta["val"].stride():
        node.graph.erase_node(kernel_call)
        return False
    replace_by(node, kernel_call)
    return True


def _kernels(indices: Any, whole: torch.Tensor, repeated: torch.Tensor) -> tuple[Any, Any] | None:
    """The kernel that reads the same neighbours as the indices, and that of its gradient."""
    sizes = (*whole.shape, *repeated.shape)
    dimensions = whole.dim() - 2
    if (
        # Two indices of None (batch, channels), then a table for each dimension in space, on the CPU.
        dimensions not in _KERNELS
        or not all(isinstance(size, int) and size for size in sizes)
        or {whole.device.type, repeated.device.type} != {"cpu"}
        or list(indices[:2]) != [None, None]
        or len(indices) != dimensions + 2
        or not all(isinstance(index, fx.Node) for index in indices[2:])
    ):
        return None
    worked_out: dict[fx.Node, Any] = {}
    tables = [_constant(index, worked_out) for index in indices[2:]]
    if any(table is None for table in tables):
        return None
    # Both kinds of nearest neighbours are tried: each dimension's table has to be the kernel's.
    for kernel, gradient in _KERNELS[dimensions]:
        if all(_reads(kernel, position, table, whole, repeated) for position, table in enumerate(tables)):
            return kernel, gradient
    return None


def _reads(kernel: Any, position: int, table: Any, whole: torch.Tensor, repeated: torch.Tensor) -> bool:
    """Return whether a kernel reads the neighbours of a table, which varies along one spatial dimension only."""
    dimensions = whole.dim() - 2
    before, after = int(whole.shape[2 + position]), int(repeated.shape[2 + position])
    line, lines = [1] * dimensions, [1] * dimensions
    line[position], lines[position] = before, after
    # The kernel itself is asked which element it reads: a row of numbers is interpolated.
    numbered = torch.arange(before, dtype=torch.float64).view(1, 1, *line)
    shape = (after, *[1] * (dimensions - 1 - position))
    return tuple(table.shape) == shape and torch.equal(kernel(numbered, lines).flatten(), table.flatten().double())


def _constant(node: fx.Node, worked_out: dict[fx.Node, Any]) -> torch.Tensor | None:
    """The value of a node that depends on constants only; ``None`` if it does not, or takes many operations."""
    if node in worked_out:
        return worked_out[node]
    sources = node.all_input_nodes
    usable = isinstance(node.target, torch._ops.OpOverload) and not is_seeded(node) and len(worked_out) < _LONGEST
    worked_out[node] = None
    if usable and all(_constant(source, worked_out) is not None for source in sources):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: worked_out[source])
        worked_out[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return worked_out[node]
