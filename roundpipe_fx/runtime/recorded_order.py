"""Recorded order: values of a stage that Inductor lowers lie in memory in the order that the graph records.

Some of Inductor's decompositions return another order than the operator that they stand for. The graph was captured
with the operator's: a view behind the value may not exist, and the stage that reads the value expects it::

    keys.transpose(1, 2) ─▶ cat with an empty cache ─▶ view    the operator: heads outermost, as the view needs them
                            the decomposition       ─▶ view ✗  tokens outermost, as the keys were computed
                            …, copied in order      ─▶ view

One is ``cat`` of which a single operand has elements, as in the caches of language models.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.fake_results import memory_order, same_dimension_order


class InRecordedOrder(fx.Interpreter):
    """Runs a graph, and copies results of operators whose dimensions are not in the recorded order."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        result, recorded = super().run_node(n), n.meta.get("val")
        if not _makes_tensor(n) or not isinstance(result, torch.Tensor) or not isinstance(recorded, torch.Tensor):
            return result
        return result if same_dimension_order(result, recorded) else _copy_in_order_of(result, recorded)


def _makes_tensor(node: fx.Node) -> bool:
    """Test for an operator's result in memory of its own."""
    if node.target is operator.getitem:
        return _makes_tensor(node.all_input_nodes[0])
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not any(result.alias_info for result in node.target._schema.returns)


def _copy_in_order_of(value: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    order = memory_order(recorded)
    copied = value.permute(order).clone(memory_format=torch.contiguous_format)
    return copied.permute([order.index(dim) for dim in range(value.dim())])
