"""Attention kernels that only devices have: the same is claimed of them as of the CPU's, which runs on tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from roundpipe_fx.analysis.dimensions import dimensions_of
from tests.analysis.dimensions.calls import text

aten = torch.ops.aten


def described(target: Any, *args: Any) -> str:
    """Described by results given as shapes, since kernels of a device cannot be run."""
    *arguments, results = args
    graph, mode = fx.Graph(), FakeTensorMode()

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        with mode:
            return torch.empty(shape)

    def as_input(value: Any) -> Any:
        if not isinstance(value, tuple):
            return value
        node = graph.placeholder("operand")
        node.meta["val"] = tensor(value)
        return node

    node = graph.call_function(target, tuple(map(as_input, arguments)))
    node.meta["val"] = tuple(tensor(shape) if isinstance(shape, tuple) else shape for shape in results)
    return text(dimensions_of(node))


QUERY, KEY, FEW_HEADS, ROWS, MASK = (2, 4, 6, 8), (2, 4, 7, 8), (2, 2, 7, 8), (2, 4, 6), (2, 1, 6, 7)
ONE_HEAD, NO_GROUPS = (2, 1, 7, 8), (2, 3, 7, 8)

FORWARD = [
    (
        aten._scaled_dot_product_flash_attention.default,
        (QUERY, KEY, KEY, 0.0, False, False, (QUERY, ROWS, None, None, 6, 7, (2,), (), (0,))),
        "a b c D, a b E D, a b E F -> a b c F, a b c, G, (), H",
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        (QUERY, KEY, KEY, 0.0, True, False, (QUERY, ROWS, None, None, 6, 7, (2,), (), (0,))),
        "a b C D, a b E D, a b E F -> a b C F, a b C, G, (), H",
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        (QUERY, FEW_HEADS, FEW_HEADS, 0.0, False, False, (QUERY, ROWS, None, None, 6, 7, (2,), (), (0,))),
        "a bc d E, a b F E, a b F G -> a bc d G, a bc d, H, (), I",
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        (QUERY, ONE_HEAD, ONE_HEAD, 0.0, False, False, (QUERY, ROWS, None, None, 6, 7, (2,), (), (0,))),
        "a b c D, a 1 E D, a 1 E F -> a b c F, a b c, G, (), H",
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        (QUERY, NO_GROUPS, NO_GROUPS, 0.0, False, False, (QUERY, ROWS, None, None, 6, 7, (2,), (), (0,))),
        "a B c D, a E F D, a E F G -> a B c G, a B c, H, (), I",
    ),
    (
        aten._scaled_dot_product_efficient_attention.default,
        (QUERY, KEY, KEY, MASK, True, 0.0, False, (QUERY, (2, 4, 32), (), ())),
        "a b C D, a b E D, a b E F, a 1 C E -> a b C F, a b G, (), ()",
    ),
    (
        aten._scaled_dot_product_efficient_attention.default,
        (QUERY, KEY, KEY, None, False, 0.0, False, (QUERY, (2, 4, 0), (), ())),
        "unknown",
    ),
    (
        aten._scaled_dot_product_flash_attention.default,
        (QUERY, KEY, KEY, 0.1, False, False, (QUERY, ROWS, None, None, 6, 7, (2,), (), (0,))),
        "unknown",
    ),
]

BACKWARD = [
    (
        aten._scaled_dot_product_flash_attention_backward.default,
        (QUERY, QUERY, KEY, KEY, QUERY, ROWS, None, None, 6, 7, 0.0, False, (2,), (), (QUERY, KEY, KEY)),
        "a b c D, a b c E, a b F E, a b F D, a b c D, a b c, G, () -> a b c E, a b F E, a b F D",
    ),
    (
        aten._scaled_dot_product_efficient_attention_backward.default,
        (QUERY, QUERY, KEY, KEY, MASK, QUERY, (2, 4, 32), (), (), 0.0, [True] * 3 + [False], (QUERY, KEY, KEY, None)),
        "a b C D, a b C E, a b F E, a b F D, a 1 C F, a b C D, a b G, (), () -> a b C E, a b F E, a b F D",
    ),
    (
        aten._scaled_dot_product_efficient_attention_backward.default,
        (QUERY, QUERY, KEY, KEY, MASK, QUERY, (2, 4, 32), (), (), 0.0, [True] * 4, (QUERY, KEY, KEY, MASK)),
        "unknown",
    ),
]


@pytest.mark.parametrize(("target", "arguments", "expected"), [*FORWARD, *BACKWARD])
def test_descriptions(target: Any, arguments: Any, expected: str) -> None:
    assert described(target, *arguments) == expected
