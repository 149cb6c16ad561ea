"""empty_operands: concatenations without the operands that are empty; what is left of one operand is its copy.

Key and value caches of language models begin empty, and the first call joins them with what it computes. Inductor
leaves such operands out, too, but copies a single one that is left as it lies in memory, and not in the order that
PyTorch's ``cat`` has. The graph was captured with that order, so a view behind it may not exist::

    keys.transpose(1, 2) ─▶ cat with nothing ─▶ view      heads outermost, as the view needs them
                            Inductor's copy  ─▶ view ✗    tokens outermost, as the keys were computed

Models that need it: causal language models in Hugging Face Transformers with ``use_cache=True``, their default, that
compute attention in matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.fake_results import same_dimension_order
from roundpipe_fx.analysis.recorded_values import copy_in_order
from roundpipe_fx.ir.graph_edit import insert_call, substitute_node
from roundpipe_fx.ir.joint_graph import JointGraph

aten = torch.ops.aten


def leave_out_empty_operands(joint: JointGraph) -> JointGraph:
    """Leave out operands of concatenations that are known to have no elements. Runs before annotate."""
    for node in list(joint.computed()):
        if node.target is aten.cat.default:
            _leave_out(node)
    return joint


def _leave_out(node: fx.Node) -> None:
    operands: Any = node.args[0]
    rest = [operand for operand in operands if not _is_empty(operand.meta["val"])]
    if not rest or len(rest) == len(operands):
        return
    value = node.meta["val"]
    # Empty operands take part in the choice of the element type.
    rest = [
        operand
        if operand.meta["val"].dtype is value.dtype
        else insert_call(node, aten._to_copy.default, operand, dtype=value.dtype)
        for operand in rest
    ]
    joined = (
        insert_call(node, aten.clone.default, *rest, memory_format=torch.contiguous_format)
        if len(rest) == 1
        else insert_call(node, aten.cat.default, rest, *node.args[1:], **node.kwargs)
    )
    # They also take part in the choice of the order in memory.
    if not same_dimension_order(joined.meta["val"], value):
        joined = copy_in_order(joined, value)
    substitute_node(node, joined)
    node.graph.erase_node(node)


def _is_empty(value: torch.Tensor) -> bool:
    return any(isinstance(size, int) and not size for size in value.shape)
