"""What ranks compare of stages: operations, and not the names that values happen to have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from roundpipe_fx.distributed import rank_plans
from roundpipe_fx.distributed.rank_plans import _module_text


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
    text = _module_text(_stage(("a", "add_4", "add_5")), {})
    assert text == _module_text(_stage(("add_4", "b", "add")), {})
    assert "add_4" not in text and "return ((%2, None, %0),)" in text


def test_operations_and_their_operands_matter() -> None:
    names = ("a", "b", "c")
    text = _module_text(_stage(names), {})
    assert text != _module_text(_stage(names, torch.ops.aten.mul.Tensor), {})
    assert text != _module_text(_stage(names, swapped=True), {})


def test_symbolic_sizes_are_numbered_as_they_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    def sized(*sizes: str) -> str:
        stage = _stage(("a", "b", "c"))
        for node, size in zip(stage.graph.nodes, sizes, strict=False):
            node.meta["val"] = size
        monkeypatch.setattr(rank_plans, "_kind", lambda value: value if isinstance(value, str) else "")
        return _module_text(stage, {})

    assert sized("s57", "u0", "s57") == sized("s10", "u3", "s10")
    assert sized("s57", "u0", "s57") != sized("s10", "u3", "s11")
    assert sized("s57") != sized("u57")
