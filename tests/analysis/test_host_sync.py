"""One predicate: the compiler, the counter and eager scopes agree about what must run once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import Mark
from tests import listed
from tests.capturing import capture_joint
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step

Run = Callable[[torch.Tensor], torch.Tensor]

ONCE: dict[str, Run] = {
    "aten.topk": lambda x: x.topk(2).values.square().sum(),
    "aten.sort": lambda x: x.sort(dim=0).values.square().sum(),
    "aten.max": lambda x: x.max(dim=1).values.square().sum(),
    "aten.min": lambda x: x.min(dim=0, keepdim=True).values.square().sum(),
    "aten.median": lambda x: x.median(dim=1).values.square().sum(),
    "aten.kthvalue": lambda x: x.kthvalue(2).values.square().sum(),
    "aten.mode": lambda x: x.mode(dim=1).values.square().sum(),
    "aten.cummax": lambda x: x.cummax(dim=1).values.square().sum(),
    "aten.argmax": lambda x: x.gather(1, x.argmax(1, keepdim=True)).square().sum(),
    "aten.searchsorted": lambda x: (x[:, 0][torch.searchsorted(x[0].detach().sort().values, x[1]).clamp(max=2)]).sum(),
    "aten.multinomial": lambda x: x.gather(1, x.detach().softmax(1).multinomial(2)).square().sum(),
}
OFTEN: dict[str, Run] = {
    "pooling": lambda x: nn.functional.max_pool1d(x[None], 2).square().sum(),
    "greatest value": lambda x: x.amax(dim=1).square().sum(),
    "whole numbers as indices": lambda x: x[torch.tensor([0, 2])].square().sum(),
    "where": lambda x: torch.where(x > 0, x, 2 * x).square().sum(),
}


def _data() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 4, requires_grad=True)


def _said(run: Run) -> tuple[set[str], set[str], set[str]]:
    """Operators that the pass hoists, that the counter counts, and that a scope's backward does not run again."""
    joint, _ = listed.annotated(capture_joint(run, _data()))
    hoisted = {str(node.target.overloadpacket) for node in joint.computed() if Mark.MUST_SAVE in node.meta}
    with roundpipe_fx.count_host_syncs() as counted:
        run(_data())
    with roundpipe_fx.gradient_checkpoint_scope():
        y = run(_data() * 1)
    loss = y * y
    del y
    with roundpipe_fx.count_host_syncs() as again:
        loss.backward()
    return hoisted, set(counted.by_operator), set(counted.by_operator) - set(again.by_operator)


@pytest.mark.parametrize("operator", ONCE)
def test_all_say_once(operator: str) -> None:
    hoisted, counted, kept = _said(ONCE[operator])
    assert operator in hoisted
    assert hoisted == counted == kept


@pytest.mark.parametrize("name", OFTEN)
def test_all_say_as_often_as_need_be(name: str) -> None:
    assert _said(OFTEN[name]) == (set(), set(), set())


class Selecting(nn.Module):
    def __init__(self, *operators: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.runs = [ONCE[operator] for operator in operators]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return sum((run(x) for run in self.runs), torch.zeros(()))


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"memory_budget": 0.0}], ids=["full", "budget"])
def test_no_selection_in_the_backward(options: dict[str, object]) -> None:
    model, batch = Selecting(*ONCE), {"x": torch.randn(6, 4)}
    reference = aot_eager_step(model, batch)
    torch._dynamo.reset()
    step, compiled = compiled_step(model, batch, stages=2, **options)
    assert_bitwise(step, reference)
    loss = compiled(**batch)
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    assert syncs.total == 0, syncs.by_operator


def test_masks_count_wherever_they_index() -> None:
    x, mask = torch.randn(4, dtype=torch.float64), torch.tensor([True, False, True, False])
    image = torch.zeros(4, dtype=torch.uint8)
    with roundpipe_fx.count_host_syncs() as syncs:
        x[mask]
        x[mask] = 1.0
        image[torch.tensor([1])] = torch.ones(1, dtype=torch.uint8)  # bytes are written, nothing is selected by them
    assert syncs.total == 2
