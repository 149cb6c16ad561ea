"""A stage's function against FX's own."""

from __future__ import annotations

import math
import operator
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from roundpipe_fx.runtime.eager_stage import eager_stage
from roundpipe_fx.torch_private import boxed_codegen
from tests.comparison import compiled_step
from tests.golden_models import GOLDEN
from tests.test_golden import _example

aten = torch.ops.aten


def _module(build: Any, root: torch.nn.Module | None = None) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(build(graph))
    graph.set_codegen(boxed_codegen())
    return fx.GraphModule(root or torch.nn.Module(), graph, class_name="stage_0_forward")


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.quick_every(2)
def test_it_does_what_fx_would(name: str) -> None:
    make, make_batch, stages = GOLDEN[name]
    _, compiled = compiled_step(make(), make_batch(), stages=stages, recompute="full")
    checked = 0
    for stage in compiled.plan.modules:
        values = [node.meta["val"] for node in stage.module.graph.nodes if node.op == "placeholder"]
        if not all(isinstance(v, torch.Tensor) and all(isinstance(size, int) for size in v.shape) for v in values):
            continue
        results = []
        for run in (stage.module.forward, eager_stage(stage.module)):
            torch.manual_seed(0)
            arguments = [_example(value) for value in values]
            torch.manual_seed(1)
            results.append(run(arguments))
            assert not arguments
        for left, right in zip(*results, strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right
        checked += 1
    assert checked


def test_constants_of_every_kind() -> None:
    seen: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> int:
        seen.append((args, kwargs))
        return len(seen)

    constants = (
        (None, True, 3, -2.5, "it's", (1,), (), [1, (2, 3)], {"a": [4]}),
        (math.inf, -math.inf, torch.float32, torch.device("cpu"), torch.strided, torch.contiguous_format, 1 + 2j),
    )

    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        first = graph.call_function(note, (*constants[0], [x, (x,)]), {"at": slice(None, x, 2)})
        return (graph.call_function(note, (*constants[1], first)), first)

    assert eager_stage(_module(build))([7]) == (2, 1)
    assert seen[0] == ((*constants[0], [7, (7,)]), {"at": slice(None, 7, 2)})
    assert seen[1] == ((*constants[1], 1), {})


def test_not_a_number_stays_none() -> None:
    def build(graph: fx.Graph) -> Any:
        return (graph.call_function(aten.add.Tensor, (graph.placeholder("x"), math.nan)),)

    assert eager_stage(_module(build))([torch.ones(2)])[0].isnan().all()


def test_values_may_be_called_like_operators() -> None:
    def build(graph: fx.Graph) -> Any:
        x = graph.placeholder("x")
        first = graph.create_node("call_function", aten.sin.default, (x,), name="aten_sin_default")
        second = graph.create_node("call_function", aten.sin.default, (first,), name="dtype")
        third = graph.call_function(aten._to_copy.default, (second,), {"dtype": torch.float64})
        return (graph.call_function(operator.getitem, ((third, x), 0)),)

    (found,) = eager_stage(_module(build))([torch.ones(2)])
    assert torch.equal(found, torch.ones(2).sin().sin().double())


def test_constants_of_the_module() -> None:
    root = torch.nn.Module()
    root.inner = torch.nn.Module()
    root.inner.register_buffer("table", torch.arange(3.0))

    def build(graph: fx.Graph) -> Any:
        return (graph.call_function(aten.add.Tensor, (graph.get_attr("inner.table"), graph.placeholder("x"))),)

    assert torch.equal(eager_stage(_module(build, root))([torch.ones(3)])[0], torch.tensor([1.0, 2.0, 3.0]))


def test_values_die_at_their_last_use() -> None:
    alive: list[bool] = []
    reference: list[weakref.ref[torch.Tensor]] = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made = x + 1
        reference.append(weakref.ref(made))
        return made

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append(reference[0]() is not None)
        return x

    def build(graph: fx.Graph) -> Any:
        made = graph.call_function(make, (graph.placeholder("x"),))
        early = graph.call_function(look, (graph.call_function(aten.sin.default, (made,)),))
        return (graph.call_function(aten.cos.default, (early,)),)

    eager_stage(_module(build))([torch.ones(2)])
    assert alive == [False]


def test_errors_quote_the_operation() -> None:
    def build(graph: fx.Graph) -> Any:
        return (graph.call_function(aten.mm.default, (graph.placeholder("left"), graph.placeholder("right"))),)

    with pytest.raises(RuntimeError) as raised:
        eager_stage(_module(build))([torch.ones(2, 3), torch.ones(2, 3)])
    assert "aten_mm_default(left, right)" in "".join(traceback.format_tb(raised.value.__traceback__))
