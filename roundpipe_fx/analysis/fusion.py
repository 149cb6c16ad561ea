"""Fusion: operations that a stage compiler computes inside the kernel that reads them.

Such a value is *virtual* where it is recomputed beside its readers: it takes no memory, and its operands are read from
where they are. Saved, it takes all of its bytes::

    saved     x ──▶ gelu(x) ══ memory ══▶ product's gradient
    virtual   x ══ memory ══▶ [gelu(x), …] in one kernel

The operators are those that PyTorch's partitioner takes to be fusible, without reductions: these are computed once,
since their results are narrow.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import (
    Mark,
    Phase,
    has_side_effect,
    has_tag,
    is_seeded,
    is_tensor,
    is_view,
    maker_of,
    readers_behind_views,
    tensor_values,
    viewed,
)
from roundpipe_fx.torch_private import positions_of_offsets

aten = torch.ops.aten

_FUSIBLE = frozenset(
    {
        aten._to_copy.default,
        aten.arange.start_step,
        aten.clone.default,
        aten.constant_pad_nd.default,
        aten.empty_like.default,
        aten.full.default,
        aten.full_like.default,
        aten.masked_fill.Scalar,
        aten.masked_fill.Tensor,
        aten.native_dropout_backward.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.tril.default,
        aten.triu.default,
        aten.where.self,
        aten.zeros_like.default,
        positions_of_offsets,
        torch.ops.prims.convert_element_type.default,
        torch.ops.prims.iota.default,
    }
)
"""Operators that are fused although they are not tagged as pointwise."""

_REDUCTIONS = frozenset(
    {
        aten.all.dim,
        aten.amax.default,
        aten.amin.default,
        aten.any.dim,
        aten.mean.default,
        aten.mean.dim,
        aten.nll_loss2d_forward.default,
        aten.nll_loss_forward.default,
        aten.prod.dim_int,
        aten.sum.default,
        aten.sum.dim_IntList,
        aten.var.correction,
        aten.var_mean.correction,
    }
)
"""Operators that read their operand inside a kernel, and whose result is computed once."""

WRITTEN_IN_KERNELS = frozenset(
    {
        aten._log_softmax.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._safe_softmax.default,
        aten._softmax.default,
        aten.native_group_norm.default,
        aten.native_layer_norm.default,
    }
)
"""Operators that are pointwise operations and reductions, of which Inductor makes kernels with what is around them."""

_ALSO_IN_KERNELS = frozenset(
    {
        aten._log_softmax_backward_data.default,
        aten._softmax_backward_data.default,
        aten.embedding.default,
        aten.gather.default,
        aten.index.Tensor,
        aten.native_dropout.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss_backward.default,
        aten.select_backward.default,
        aten.slice_backward.default,
    }
)
"""Operators of which Inductor makes kernels, beyond those of :func:`is_in_kernel`."""

COSTLY_ON_CPUS = frozenset(
    {
        aten._log_softmax_backward_data.default,
        aten._softmax_backward_data.default,
        aten.exp.default,
        aten.log.default,
        aten.log1p.default,
        aten.log2.default,
        aten.mish.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.silu_backward.default,
        aten.softplus.default,
        aten.tanh.default,
    }
)
"""Operators that Inductor does not compute twice on a CPU: their kernel writes what another loop reads again.

PyTorch 2.11 computes ``tanh`` and logarithms twice, and the estimate is too high.
"""


def is_fusible(node: fx.Node) -> bool:
    """Test for an operation that may be repeated inside the kernels that read its result.

    Args:
        node: of an annotated graph. Views are not fusible: they compute nothing.
    """
    if dropped_operands(node) is not None:
        return True
    if node.op != "call_function" or not is_tensor(node) or is_view(node) or Mark.MUST_SAVE in node.meta:
        return False
    if not has_tag(node.target, torch.Tag.pointwise) and node.target not in _FUSIBLE:
        return False
    value = node.meta["val"]
    if value.layout is not torch.strided or value.is_complex() or _rounds_to_integers(node):
        return False
    return not is_seeded(node) and not has_side_effect(node)


def _rounds_to_integers(node: fx.Node) -> bool:
    """Test for indices that another rounding of what they are computed from could change."""
    value = node.meta["val"]
    if value.is_floating_point() or value.dtype is torch.bool:
        return False
    return any(operand.is_floating_point() for source in node.all_input_nodes for operand in tensor_values(source))


def is_in_kernel(node: fx.Node) -> bool:
    """Test for an operation that is computed in kernels with what is around it, in place of one of its own.

    Args:
        node: of an annotated graph.
    """
    maker = maker_of(node)
    return is_fusible(maker) or maker.target in _REDUCTIONS or maker.target in WRITTEN_IN_KERNELS


def is_computed_in_kernel(node: fx.Node) -> bool:
    """Test for an operation of :func:`is_in_kernel`, or one that Inductor decomposes into such."""
    maker = maker_of(node)
    return is_in_kernel(node) or maker.target in _ALSO_IN_KERNELS


def is_virtual(node: fx.Node, phase: Phase) -> bool:
    """Test for a fusible operation whose result takes no memory in a phase, since only the kernel of it reads it there.

    A reader that waits for a product of the value runs in a later kernel, as the end of a residual connection does::

        x ──▶ norm ──▶ mm ──▶ add        the kernel of norm computes x and writes it, for that of add
        └─────────────────────▲

    On a CPU, a costly result that several loops of the kernel read is written by the first.

    Args:
        node: of an annotated graph.
        phase: the phase whose readers count.
    """
    if not is_fusible(node) or not all(_shares_kernel(node, reader) for reader in _readers(node, phase)):
        return False
    return not (is_on_cpu(node) and _is_costly(node) and _is_read_in_loops(node, phase))


def _readers(node: fx.Node, phase: Phase) -> Iterator[fx.Node]:
    """Operations of a phase that read a value, directly or through views; the graph's output, too."""
    return (
        reader for reader in readers_behind_views(node) if reader.op == "output" or reader.meta.get(Mark.PHASE) is phase
    )


def _shares_kernel(node: fx.Node, reader: fx.Node) -> bool:
    """Test for a reader in the stage of a value that waits for nothing that is computed from it outside of kernels."""
    if reader.op == "output" or not is_in_kernel(reader) or reader.meta.get(Mark.STAGE) != node.meta.get(Mark.STAGE):
        return False
    # Backwards from the reader: between it and the value, once with and once without a kernel of another operation.
    pending = [(reader, False)]
    seen = set(pending)
    while pending:
        current, after_another = pending.pop()
        if current is node and after_another:
            return False
        for operand in current.all_input_nodes:
            if operand < node:
                continue
            another = after_another or not (operand is node or is_view(operand) or is_in_kernel(operand))
            if (operand, another) not in seen:
                seen.add((operand, another))
                pending.append((operand, another))
    return True


def _is_costly(node: fx.Node) -> bool:
    """Test for a value that a costly operation computes, alone or with operations that are fused with it."""
    pending, seen = [node], {node}
    while pending:
        current = pending.pop()
        if current.target in COSTLY_ON_CPUS:
            return True
        bases = {viewed(operand) for operand in current.all_input_nodes} - seen
        seen |= bases
        pending += [base for base in bases if is_fusible(base) and _same_module(base, node)]
    return False


def _is_read_in_loops(node: fx.Node, phase: Phase) -> bool:
    """Test for a value that a kernel reads again after a reduction of it: to normalize it, say."""
    pending, reached = [(node, False)], {(node, False)}
    while pending:
        current, reduced = pending.pop()
        for reader in _readers(current, phase):
            if reader.op == "output" or not is_in_kernel(reader) or not _same_module(reader, node):
                continue
            if (reader, not reduced) in reached or (reader.target in WRITTEN_IN_KERNELS and not reduced):
                return True
            if (reader, reduced) in reached:
                continue
            reached.add((reader, reduced))
            pending.append((reader, reduced or reader.target in _REDUCTIONS))
    return False


def _same_module(node: fx.Node, other: fx.Node) -> bool:
    return all(node.meta.get(mark) == other.meta.get(mark) for mark in (Mark.STAGE, Mark.PHASE))


def is_on_cpu(node: fx.Node) -> bool:
    """Return whether a value, or a part of it, is a tensor on the host."""
    return any(value.device.type == "cpu" for value in tensor_values(node))


def dropped_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Operands of the products that a dropout's result is, if it is one: its input, its mask, and the factor."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    (maker,) = node.all_input_nodes
    if maker.target is not aten.native_dropout.default:
        return None
    source, probability, train = maker.args
    mask = next((user for user in maker.users if user.target is operator.getitem and user.args[1] == 1), None)
    if not isinstance(source, fx.Node) or not isinstance(probability, float) or train is False or mask is None:
        return None
    return (source, mask, 1 / (1 - probability)) if 0 < probability < 1 else None
