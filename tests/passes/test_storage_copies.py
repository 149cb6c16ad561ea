from __future__ import annotations

import copy
from typing import Any

import expecttest
import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.passes.storage_copies import copy_parts_only
from tests.capturing import capture_joint
from tests.comparison import aot_eager_step, assert_bitwise, train_step
from tests.graph_text import after


class _Bank(nn.Module):
    """Writes what it computes into places of a buffer that is much larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.register_buffer("bank", torch.randn(512, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        with torch.no_grad():
            self.bank[: len(x)] = y
            self.bank[:, 3].mul_(0.5)
            self.bank.view(8, 64, 64)[0].diagonal().add_(1.0)
        return (y @ self.bank.t()).square().mean()


class _Scatters(nn.Module):
    """Writes into parts of its input, and of parts of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x))
        w = torch.select_scatter(y[:, ::2], torch.ones(len(x)), 1, 3)
        v = torch.slice_scatter(x[:, 5:40], y[:, :3], 1, 2, 5)
        u = torch.diagonal_scatter(x.t(), torch.ones(len(x)))
        return (w.sum(1) + v.square().sum(1)).square().mean() + (u.t() * y).mean()


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x)).clone()
        y[:, 2:4] = x[:, :2] * y[:, 5:7]
        y[1] = y[0] * 2
        y.diagonal().mul_(3)
        return (y * x).square().mean()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("options", [{"recompute": "none"}, {"memory_budget": 0.0}], ids=str)
@pytest.mark.parametrize("kind", [_Bank, _Scatters, _InPlace])
@pytest.mark.quick_every(4)
def test_no_storage_is_copied_whole(kind: type[nn.Module], options: dict[str, Any], dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model, batch = kind(), {"x": torch.randn(3000, 64)[7:23]}
    reference = aot_eager_step(model, batch)
    compiled = roundpipe_fx.compile(copy.deepcopy(model), dynamic=dynamic, **options)
    assert_bitwise(train_step(compiled, compiled, batch), reference)
    compiled.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**batch).backward()
    assert peak.bytes <= compiled.plan.peak_bytes < 2 * 512 * 64 * 4


def test_a_bank_is_copied_once() -> None:
    joint = copy_parts_only(capture_joint(_Bank(), torch.randn(16, 64)))
    copies = [node.meta["val"].numel() for node in joint.computed() if "clone" in node.name or "copy" in node.name]
    assert copies == [512 * 64, 64 * 64], "the bank, and the part whose diagonal is written"


def test_a_buffer_that_is_replaced_is_not_copied() -> None:
    class Replacing(_Bank):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.bank.copy_(self.bank * 0.5 + 1)
            return y.square().mean()

    targets = [str(node.target) for node in copy_parts_only(capture_joint(Replacing(), torch.ones(2, 64))).computed()]
    assert "aten.copy.default" not in targets and "aten.clone.default" not in targets


class _Rounded(nn.Module):
    """Writes over views of a copy of what it reads again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v = x * 2
        part = v[:, 1:3]
        t, u = torch.empty_like(v).copy_(v), part.clone(memory_format=torch.preserve_format).copy_(part)
        t.detach().view(-1).round_()
        u.detach()[0].neg_()
        return 3 * v.sum() + 5 * t.square().sum() + 7 * (u * part).sum()


@pytest.mark.parametrize("budget", [None, 0.0])
def test_what_is_copied_is_not_written_over_while_it_is_read(budget: float | None) -> None:
    x = torch.randn(5, 7)
    own, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, reference = roundpipe_fx.compile(_Rounded(), memory_budget=budget)(own), _Rounded()(expected)
    loss.backward()
    reference.backward()
    assert torch.equal(loss, reference)
    torch.testing.assert_close(own.grad, expected.grad, rtol=0, atol=0)


def test_a_copy_that_is_returned_is_a_tensor_of_its_own() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            v = x * 2
            return v, torch.empty_like(v).copy_(v), torch.empty_like(v).copy_(v).view(-1)

    found = roundpipe_fx.compile(Two())(torch.randn(3, 4, requires_grad=True))
    assert len({value.untyped_storage().data_ptr() for value in found}) == 3


def test_as_text_a_part_is_copied_alone() -> None:
    before = """\
def joint(
    x: float32[100, 8],
    row: float32[8],
):
    # captured
    part: float32[2, 8] = aten.slice.Tensor(x, 0, 0, 2)
    select_scatter: float32[2, 8] = aten.select_scatter.default(part, row, 0, 1)
    return (select_scatter,), ()
"""
    made = after(copy_parts_only, before, name="storage_copies")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[100, 8],
    row: float32[8],
):
    # captured
    part: float32[2, 8] = aten.slice.Tensor(x, 0, 0, 2)
    clone_default: float32[2, 8] = aten.clone.default(part)
    select_scatter: float32[2, 8] = aten.select_scatter.default(clone_default, row, 0, 1)
    return (select_scatter,), ()
""",
    )


def test_as_text_a_whole_value_is_left() -> None:
    before = """\
def joint(
    x: float32[2, 8],
    row: float32[8],
):
    # captured
    neg: float32[2, 8] = aten.neg.default(x)
    select_scatter: float32[2, 8] = aten.select_scatter.default(neg, row, 0, 1)
    return (select_scatter,), ()
"""
    made = after(copy_parts_only, before, name="storage_copies")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 8],
    row: float32[8],
):
    # captured
    neg: float32[2, 8] = aten.neg.default(x)
    select_scatter: float32[2, 8] = aten.select_scatter.default(neg, row, 0, 1)
    return (select_scatter,), ()
""",
    )
