"""Forms are what the operations compute, at every index and for every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from roundpipe_fx.frontend.affine_forms import Affine, Choice, IndexForm
from roundpipe_fx.frontend.index_forms import index_form, pure_operation, run_on_host
from tests.frontend.dynamo_graphs import dynamo_graph

Function = Callable[[int], torch.Tensor]


def _forms(module: fx.GraphModule) -> dict[fx.Node, IndexForm | None]:
    forms: dict[fx.Node, IndexForm | None] = {}
    for node in module.graph.nodes:
        forms[node] = index_form(node, forms)
    return forms


def _result(function: Function, length: int, dynamic: bool) -> IndexForm | None:
    module = dynamo_graph(lambda x: function(x.shape[0]), torch.ones(length), dynamic=dynamic)
    results: Any = module.graph.output_node().args[0]
    return _forms(module)[results[0]]


def _value(form: IndexForm, shape: torch.Size) -> torch.Tensor:
    if isinstance(form, Choice):
        holds = torch.ones(shape, dtype=torch.bool)
        for condition in form.conditions:
            holds &= _value(condition, shape) <= 0
        return torch.where(holds, torch.tensor(form.inside), torch.tensor(form.outside))
    value = torch.full(shape, form.offset)
    for dim, slope in enumerate(form.slopes):
        size = [1] * len(shape)
        size[dim] = shape[dim]
        value = value + slope * torch.arange(shape[dim]).view(size) if slope else value
    return value


def _rows(n: int) -> torch.Tensor:
    return torch.arange(n)[:, None]


KNOWN: dict[str, Function] = {
    "arange": lambda n: torch.arange(3, n + 3),
    "steps": lambda n: torch.arange(1, 2 * n, 2),
    "sum": lambda n: _rows(n) + torch.arange(n) - 3,
    "slices": lambda n: (torch.arange(n)[None] - _rows(n))[1:, None, ..., 2::2],
    "a row": lambda n: torch.arange(n).expand(3, -1)[1],
    "differences": lambda n: torch.diff(torch.arange(n), prepend=torch.arange(n)[:1] - 1),
    "cumulated": lambda n: torch.ones(2, n, dtype=torch.int64).cumsum(-1),
    "never": lambda n: (torch.diff(torch.arange(n).expand(2, -1)) != 1).cumsum(-1),
    "gathered": lambda n: torch.zeros(n)[torch.arange(n)[:, None]],
    "gathered from rows": lambda n: torch.arange(1, n + 1).expand(3, -1)[_rows(3), torch.arange(0, 6, 2)],
    "gathered of all": lambda n: (torch.arange(n) < _rows(n))[_rows(n), torch.arange(n)[None, None]],
    "gathered by one number": lambda n: torch.arange(n)[torch.arange(1, 2)] + torch.arange(n),
    "compared": lambda n: torch.arange(n) <= _rows(n),
    "both": lambda n: (torch.arange(n) > _rows(n) - 3) & (torch.arange(n) <= _rows(n)),
    "strictest": lambda n: (torch.arange(n) <= _rows(n)) & (torch.arange(n) < _rows(n) + 3),
    "chosen": lambda n: torch.where(torch.arange(n) < _rows(n), 2.0, -torch.inf) * 3,
    "lower": lambda n: torch.full((n, n), 7.0).tril(1),
    "upper": lambda n: torch.full((2, n, n), 7).triu(-1),
    "filled": lambda n: torch.zeros(n, n).masked_fill(~(torch.arange(n) <= _rows(n)), -torch.inf),
    "a dimension more": lambda n: (torch.arange(n) < _rows(n)).unsqueeze(-2).unsqueeze(0),
    "transposed": lambda n: (torch.arange(n) < _rows(n)).transpose(0, 1),
    "one column": lambda n: (torch.arange(n) < _rows(n))[:, :1] & torch.ones(n, n, dtype=torch.bool),
    "rounded": lambda n: torch.full((n,), 1 / 3, dtype=torch.bfloat16) == 0.333984375,
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_a_form_is_what_is_computed(name: str, dynamic: bool) -> None:
    form = _result(KNOWN[name], 6, dynamic)
    assert form is not None
    for length in (6, 13) if dynamic else (6,):
        expected = KNOWN[name](length)
        assert torch.equal(_value(form, expected.shape).to(expected.dtype), expected)


UNKNOWN: dict[str, Function] = {
    "product": lambda n: torch.arange(n) * _rows(n),
    "rounding": lambda n: torch.arange(n, dtype=torch.float16),
    "overflow": lambda n: torch.arange(n, dtype=torch.uint8) - 1,
    "large numbers": lambda n: torch.arange(n) + torch.iinfo(torch.int64).max < torch.arange(n) + 1,
    "from the end": lambda n: torch.arange(n)[-2:],
    "equal": lambda n: torch.arange(n) == _rows(n),
    "gathered": lambda n: torch.arange(n)[torch.arange(n) - 1],
    "gathered by a mask": lambda n: torch.arange(4)[torch.arange(4) < 2],
    "gathered in part": lambda n: (torch.arange(n) - _rows(n))[torch.arange(n)],
    "other first difference": lambda n: torch.diff(torch.arange(n), prepend=torch.arange(n)[:1]),
    "either": lambda n: (torch.arange(n) <= _rows(n)) | (torch.arange(n) < 2),
    "random": lambda n: torch.rand(n),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_others_have_none(name: str) -> None:
    assert _result(UNKNOWN[name], 6, True) is None


def test_equal_conditions_are_spelled_alike() -> None:
    causal = Choice(frozenset([Affine((-1, 1), 0)]), True, False)
    for same in (
        lambda n: torch.arange(n) <= _rows(n),
        lambda n: _rows(n) >= torch.arange(n),
        lambda n: _rows(n) + 1 > torch.arange(n),
        lambda n: ~(torch.arange(n) > _rows(n)),
        lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
        lambda n: ~torch.ones(n, n, dtype=torch.bool).triu(1),
    ):
        assert _result(same, 6, True) == causal


def test_operations_that_write_are_not_pure() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        y = torch.ones(2).mul_(2)
        y += 1
        torch.abs_(y)
        torch.add(y, 1, out=y)
        y[0] = 2
        return y

    module = dynamo_graph(write, torch.ones(2))
    calls = [node for node in module.graph.nodes if node.op.startswith("call")]
    assert [node for node in calls if pure_operation(node)] == calls[:1]


def test_operations_run_on_the_host() -> None:
    module = dynamo_graph(lambda x: torch.arange(3, device="meta").to("meta").to(device="meta"), torch.ones(2))
    values: dict[fx.Node, torch.Tensor] = {}
    for node in module.graph.nodes:
        if node.op.startswith("call"):
            values[node] = run_on_host(node, values)
    assert values and all(value.device.type == "cpu" for value in values.values())
