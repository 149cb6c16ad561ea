"""Frames that are traced again: numbers that Python reads break the graph; sizes that must be plain are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx


class _Chosen(nn.Module):
    """A size drawn at random, as of data augmentation; a momentum that depends on a counter; both after dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Dropout(0.5)
        self.last, self.sizes = nn.Linear(4, 4), [2.0, 3.0, 4.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.dropout(self.first(x)))
        number = int(torch.empty(1).uniform_(0.0, float(len(self.sizes))).item())
        return (self.last(x) * self.sizes[number]).sum()


def _flags() -> tuple[bool, bool]:
    config = torch._dynamo.config
    return config.capture_scalar_outputs, config.capture_dynamic_output_shape_ops


@pytest.mark.filterwarnings("ignore::roundpipe_fx.GraphBreakWarning")
@pytest.mark.long
def test_a_random_size_read_by_python() -> None:
    base, x, before = _Chosen(), torch.randn(4, 4), _flags()

    def steps(model: nn.Module, compiled: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        for _ in range(2):
            compiled(x).backward()
        return [*(p.grad for p in model.parameters()), *model.buffers(), torch.rand(1)]

    reference = copy.deepcopy(base)
    expected = steps(reference, torch.compile(reference, backend="aot_eager"))
    for compile_with in (
        roundpipe_fx.compile,
        lambda model: roundpipe_fx.compile(model, memory_budget=0.0),
        lambda model: torch.compile(model, backend="roundpipe_fx"),
    ):
        torch._dynamo.reset()
        model = copy.deepcopy(base)
        assert all(map(torch.equal, steps(model, compile_with(model)), expected))
        assert _flags() == before
    torch._dynamo.reset()
    for options in ({"fullgraph": True}, {"num_microbatches": 2}):
        with pytest.raises(torch._dynamo.exc.UserError, match="data-dependent expression"):
            roundpipe_fx.compile(base, **options)(x)
        assert _flags() == before


class _Grid(nn.Module):
    """``affine_grid``, whose derivative PyTorch computes from plain sizes only."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theta = self.theta(x).view(-1, 2, 3).tanh()
        return nn.functional.affine_grid(theta, [x.shape[0], 1, 3, 4], align_corners=False).square().sum()


class _Quantized(nn.Module):
    """An operator without a fake kernel: it is traced by running it, which needs plain sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(self.layer(x), 0.1, 0, -8, 7).square().sum()


@pytest.mark.parametrize("make", [_Grid, _Quantized])
@pytest.mark.parametrize("options", [{"fullgraph": True}, {"num_microbatches": 3, "loss_reduction": "sum"}])
def test_sizes_that_are_needed_as_numbers(make: Any, options: dict[str, Any]) -> None:
    model = make()
    compiled = roundpipe_fx.compile(model, **options)
    for rows in (4, 8, 5):
        x = torch.randn(rows, 4)
        model.zero_grad()
        model(x).backward()
        expected = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        compiled(x).backward()
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    assert torch._dynamo.config.automatic_dynamic_shapes


def test_a_budget_that_the_current_sizes_do_not_allow() -> None:
    model = _Quantized()
    budget = roundpipe_fx.compile(model, memory_budget=1.0).trace(torch.randn(64, 4)).peak_bytes
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, fullgraph=True)
    compiled(torch.randn(64, 4)).backward()
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        compiled(torch.randn(6400, 4))
    assert refused.value.minimum > budget
    compiled(torch.randn(32, 4)).backward()


class _Sparse(nn.Module):
    """A sparse gradient whose number of rows depends on data that PyTorch's own derivative reads."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(20, 4, sparse=True, padding_idx=0), nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(rows)).square().mean()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_frame_that_a_retry_would_run_eagerly_runs_eagerly() -> None:
    model, rows = _Sparse(), torch.randint(20, (3, 4))
    model(rows).backward()
    expected = [p.grad.to_dense() for p in model.parameters()]
    for compile_with in (
        roundpipe_fx.compile,
        lambda model: roundpipe_fx.compile(model, memory_budget=0.0),
        lambda model: torch.compile(model, backend="roundpipe_fx"),
    ):
        torch._dynamo.reset()
        compiled = compile_with(model)
        for _ in range(2):
            model.zero_grad()
            compiled(rows).backward()
            assert model.table.weight.grad.is_sparse
            torch.testing.assert_close([p.grad.to_dense() for p in model.parameters()], expected)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="data-dependent"):
        roundpipe_fx.compile(model, fullgraph=True)(rows)
