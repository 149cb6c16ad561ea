"""What ranks compare of stages: operations, and not the names that values happen to have."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from roundpipe_fx.pipeline.compared_texts import _module_text


def _stage(
    names: tuple[str, str, str], operator: Any = torch.ops.aten.add.Tensor, swapped: bool = False
) -> fx.GraphModule:
    graph = fx.Graph()
    left, right = graph.placeholder(names[0]), graph.placeholder(names[1])
    total = graph.create_node("call_function", operator, (right, left) if swapped else (left, right), name=names[2])
    graph.output((total, None, left))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2)
    return fx.GraphModule(torch.nn.Module(), graph)


def test_names_do_not_matter() -> None:
    text = _module_text(_stage(("a", "add_4", "add_5")))
    assert text == _module_text(_stage(("add_4", "b", "add")))
    assert "add_4" not in text and "return ((%2, None, %0),)" in text


def test_operations_and_their_operands_matter() -> None:
    names = ("a", "b", "c")
    text = _module_text(_stage(names))
    assert text != _module_text(_stage(names, torch.ops.aten.mul.Tensor))
    assert text != _module_text(_stage(names, swapped=True))
