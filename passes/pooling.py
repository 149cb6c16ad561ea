"""pooling: save no more of a pooled image than its gradient reads, where Inductor compiles the stages.

Of the image itself gradients of pooling read the sizes alone, but have it among their operands; so it would be saved.
Of each maximum they read the position in the image, an integer of eight bytes. The position in the window fits in one,
and is what Inductor's kernel computes::

    x ─▶ max_pool2d_with_indices ─▶ y, indices                  backward: grad, x, indices (int64)
    x ─▶ maxima and offsets ─▶ y, offsets                       backward: grad, sizes, offsets (int8) ─▶ indices

Offsets are Inductor's (:func:`roundpipe_fx.torch_private.inductor_decomposition`), and so are the windows for which it
has them: of up to 25 elements. The indices are computed in the kernel that reads them (``fused_recompute``).
"""

from __future__ import annotations

import torch
from torch import fx

from roundpipe_fx.ir.graph_edit import insert_call, insert_decomposed
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.torch_private import inductor_decomposition

aten = torch.ops.aten

_MAXIMA = frozenset({aten.max_pool2d_with_indices.default, aten.max_pool3d_with_indices.default})
_GRADIENTS = {
    aten.max_pool2d_with_indices_backward.default: 2,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.avg_pool2d_backward.default: 2,
    aten.avg_pool3d_backward.default: 3,
    aten._adaptive_avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool3d_backward.default: 3,
}
"""Operators whose second operand is the pooled image, and their dimensions in space."""


def save_offsets_alone(joint: JointGraph) -> JointGraph:
    """Rewrite pooling and its gradients. Runs before annotate."""
    for node in list(joint.computed()):
        if node.target in _MAXIMA:
            insert_decomposed(node, inductor_decomposition(node))
        elif node.target in _GRADIENTS:
            _read_sizes_alone(node, _GRADIENTS[node.target])
    return joint


def _read_sizes_alone(node: fx.Node, dimensions: int) -> None:
    """Let a gradient read zeros that take no memory, with the sizes of its image, where those in space are known."""
    gradient, image, *others = node.args
    assert isinstance(gradient, fx.Node) and isinstance(image, fx.Node)
    value = image.meta["val"]
    in_space = value.shape[-dimensions:]
    if not all(isinstance(size, int) for size in in_space):
        return
    # Images and channels are those of the incoming gradient, which is there.
    leading = [
        size if isinstance(size, int) else insert_call(node, aten.sym_size.int, gradient, dim)
        for dim, size in enumerate(value.shape[:-dimensions])
    ]
    zero = insert_call(node, aten.full.default, [], 0, dtype=value.dtype, device=value.device)
    node.args = (gradient, insert_call(node, aten.expand.default, zero, [*leading, *in_space]), *others)
