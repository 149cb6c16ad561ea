"""Values of selections that are gathered again lie in memory as the selection's own kernel let them lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.ordered_gather import gather_in_order, memory_order
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (0, 2, 1)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathering_in_an_order(order: tuple[int, ...], dim: int) -> None:
    source = torch.randn(4, 5, 6)
    indices = source.argsort(dim)
    gathered = gather_in_order(source, dim, indices, order)
    assert torch.equal(gathered, source.gather(dim, indices))
    assert memory_order(gathered) == order


def test_the_order_of_what_is_not_dense() -> None:
    assert memory_order(torch.randn(4, 6)[:, ::2]) is None
    assert memory_order(torch.randn(4, 1).expand(4, 3)) is None
    assert memory_order(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)) == (0, 2, 3, 1)


class _Selects(nn.Module):
    """A selection from what does not lie in the order of its dimensions; what reads it sums in the order it finds."""

    def __init__(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scale, self.layer = nn.PReLU(4), nn.Linear(4, 48)
        self._select = select

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self._half(x) + self._half(x * 0.5)).tanh().mean()

    def _half(self, x: torch.Tensor) -> torch.Tensor:
        y = self._select(x.transpose(0, 1)).transpose(0, 1)
        z = nn.functional.max_pool2d(self.layer(y).view(-1, 4, 2, 6), 2, 1, 1)
        return z + self.scale(y).mean()


@pytest.mark.parametrize(
    "select",
    [
        lambda y: y.sort(0).values,
        lambda y: y.sort(dim=1, stable=True).values,
        lambda y: y.topk(4, dim=0).values,
        lambda y: y.cummax(0).values,
        lambda y: y.cummin(-1).values,
        lambda y: y.msort(),
    ],
    ids=["sort", "stable", "topk", "cummax", "cummin", "msort"],
)
@pytest.mark.quick_every(3)
def test_bits_of_what_reads_a_selection(select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(59)
    model, batch = _Selects(select), {"x": torch.randn(6, 4, requires_grad=True)}
    reference = aot_eager_step(model, batch)
    for options in ({"recompute": "full", "stages": 1}, {"memory_budget": 0.0}):
        torch._dynamo.reset()
        step, compiled = compiled_step(model, batch, **options)
        assert_bitwise(step, reference)
        with roundpipe_fx.count_host_syncs() as syncs:
            compiled(**batch).backward()
        assert syncs.total <= 2  # in the forward
