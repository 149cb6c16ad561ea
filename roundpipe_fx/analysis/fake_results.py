"""Fake results: what an operation returns if an operand has other strides than the graph records.

Strides are compared by the order of dimensions in memory only. That order decides which element a view reads and in
which order a kernel traverses memory; dimensions of one element do not count.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost import layout_of
from roundpipe_fx.ir.joint_graph import tensor_values

log = logging.getLogger(__name__)


def run_fake_kernel(node: fx.Node, source: fx.Node | None = None, value: torch.Tensor | None = None) -> Any:
    """The result of a node's fake kernel on the recorded values of its operands.

    Args:
        node: a PyTorch operator that returns at least one tensor.
        source: an operand that is assumed to have another value.
        value: that value, a fake tensor.

    Returns:
        Fake tensors, in the structure that the operator returns; ``None`` if the fake kernel fails.
    """

    def assumed(operand: fx.Node) -> Any:
        return value if operand is source else operand.meta.get("val")

    assert isinstance(node.target, torch._ops.OpOverload)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), assumed)
    with tensor_values(node)[0].fake_mode:  # type: ignore[attr-defined]
        try:
            return node.target(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            log.info("%s does not accept an operand with other strides: %s", node.target, error)
            return None


def result_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among an operator's results."""
    return [item for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor)]


def memory_order(value: torch.Tensor) -> list[int]:
    """The dimensions of a tensor, the outermost in memory first. Those of one element have no order and are last."""
    sizes, strides = layout_of(value)
    return sorted(range(len(sizes)), key=lambda dim: (-strides[dim] if sizes[dim] > 1 else 0, dim))


def same_dimension_order(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two fake tensors of one shape have their dimensions in the same order in memory."""
    (sizes, strides), (_, others) = layout_of(left), layout_of(right)
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    return sorted(dims, key=lambda dim: -strides[dim]) == sorted(dims, key=lambda dim: -others[dim])
