"""Odd input of steps that only tiles make fit: rows, labels, dtypes, frozen parameters, random numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.long import long_but
from tests.planner.tiled import assert_close, assert_no_worse, check, is_tiled, minimum, step
from tests.planner.tiled_models import MLP, WORDS, Head, batch, both, gradients, least


@pytest.mark.parametrize("rows", long_but([61, 63, 3], quick={61}))
def test_rows_that_tiles_do_not_divide(rows: int) -> None:
    check(Head().double(), batch(rows), tiles=rows > 3)


@pytest.mark.long
def test_one_row_and_none() -> None:
    check(Head().double(), batch(1), tiles=False)
    check(Head().double(), batch(0), tiles=False)
    check(MLP().double(), {"x": torch.randn(0, 8, dtype=torch.float64)}, tiles=False)


class FewClasses(nn.Module):
    """An image classifier's end, with few images and few classes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 256), nn.Linear(256, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.down(F.gelu(self.up(x))).mean(1)), y)


def test_a_head_that_is_too_small_to_be_tiled() -> None:
    given = {"x": torch.randn(2, 64, 8, dtype=torch.float64), "y": torch.tensor([3, 0])}
    check(FewClasses().double(), given)


@pytest.mark.long
def test_other_batches_are_replanned() -> None:
    given = batch(64)
    plain, compiled = both(Head().double(), given)
    for rows in (64, 32, 48, 64):  # whose number is known in each plan, so that they are divided
        other = batch(rows)
        assert_close(step(compiled, compiled, other), step(plain, plain, other), 1e-12)
        assert is_tiled(compiled)


@pytest.mark.long
def test_rows_of_any_number_are_not_divided() -> None:
    given = batch(64)
    model = Head().double()
    budget = minimum(model, given, tiling="never", dynamic=True)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget, dynamic=True)
    for rows in (64, 40):
        other = batch(rows)
        assert_close(step(compiled, compiled, other), step(model, model, other), 1e-12)
    torch._dynamo.reset()
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1, dynamic=True)(**given)
    assert refused.value.minimum <= budget
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=refused.value.minimum, dynamic=True)
    assert_close(step(compiled, compiled, given), step(model, model, given), 1e-12)


def test_marked_dimensions() -> None:
    given = batch(64)
    for value in given.values():
        torch._dynamo.mark_dynamic(value, 0)
    model = Head().double()
    budget = minimum(model, given)
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget)
    assert_close(step(compiled, compiled, given), step(model, model, given), 1e-12)


@pytest.mark.long
def test_labels_that_are_ignored() -> None:
    given = batch()
    some = given["y"].clone()
    some[::3] = -100
    some[16:32] = -100  # all of a tile
    check(Head().double(), {**given, "y": some})
    check(Head().double(), {**given, "y": torch.full_like(some, -100)})
    model = Head().double()
    compiled = least(model, given)
    assert compiled(**{**given, "y": torch.full_like(some, -100)}).isnan()


def test_labels_out_of_range() -> None:
    given = batch()
    compiled = least(Head().double(), given)
    with pytest.raises(IndexError):
        compiled(x=given["x"], y=given["y"] + WORDS)
    compiled(**given).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.quick_every(2)
def test_autocast(dtype: torch.dtype) -> None:
    given = batch(dtype=torch.float32)
    model = Head()
    plain = copy.deepcopy(model)

    def taken(run: Any, model: nn.Module) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype):
            loss = run(**given)
        loss.backward()
        return gradients(model)

    exact = copy.deepcopy(model).double()
    exact(given["x"].double(), given["y"]).backward()
    with torch.autocast("cpu", dtype):
        budget = minimum(model, given)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    found, expected = taken(compiled, model), taken(plain, plain)
    assert is_tiled(compiled)
    assert_no_worse(found, expected, gradients(exact))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["head", "upcast", "mlp"])
@pytest.mark.quick_every(6)
def test_half_precision_rounds_as_without_tiles(kind: str, dtype: torch.dtype) -> None:
    """Sums over many tiles are made in float32."""

    class Upcast(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(torch.tanh(self.body(x))).float(), y)

    rows = 1024
    given: dict[str, torch.Tensor] = {"x": torch.randn(rows, 8).to(dtype)}
    if kind != "mlp":
        given["y"] = torch.randint(0, WORDS, (rows,))
    model = {"head": Head, "upcast": Upcast, "mlp": MLP}[kind]().to(dtype)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact_given = {name: v.double() if v.is_floating_point() else v for name, v in given.items()}
    if kind == "upcast":
        exact.__class__ = Head
    losses = [exact(**exact_given), plain(**given)]
    compiled = least(model, given)
    losses.append(compiled(**given))
    factor = 2.0**10 if dtype is torch.float16 else 1.0
    for run, loss in zip((exact, plain, compiled), losses, strict=True):
        (loss * factor).backward()
        for p in run.parameters():
            p.grad /= factor
    assert is_tiled(compiled) or (kind == "head" and dtype is torch.float16)
    assert_no_worse(gradients(compiled), gradients(plain), gradients(exact))
    error = [abs(float(loss) - float(losses[0])) for loss in losses[1:]]
    assert error[1] <= 1.5 * error[0] + abs(float(losses[0])) * (2.0**-8 if kind != "upcast" else 2.0**-20)


def test_a_mean_of_float16_does_not_overflow() -> None:
    """The sum of what is averaged is beyond 65,504."""

    class Squares(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.head(torch.tanh(self.body(x))), y) + self.head(x).abs().mean()

    given = {"x": torch.randn(1024, 8).half(), "y": torch.randn(1024, WORDS).half()}
    plain, compiled = both(Squares().half(), given)
    found, expected = compiled(**given), plain(**given)
    assert torch.isfinite(expected) and torch.allclose(found, expected, rtol=1e-2)


@pytest.mark.long
def test_frozen_heads_and_adapters() -> None:
    model = Head().double()
    model.head.requires_grad_(False)
    check(model, batch())
    model.body.requires_grad_(False)
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    check(model, {**batch(), "x": x})


@pytest.mark.long
def test_low_rank_adapters_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, Head()).double()
    model.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    check(model, batch())


def test_nothing_to_differentiate() -> None:
    model = Head().double().requires_grad_(False)
    given = batch()
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1, tiling="auto")
    assert torch.equal(compiled(**given), model(**given))


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 7])
def test_masks_are_drawn_as_without_tiles(seed: int) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = MLP(0.5), MLP(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.dropout(x, 0.1, self.training)
            return self.one(x) + self.two(x) * torch.rand_like(x).mean()

    given = {"x": torch.randn(64, 8, dtype=torch.float64)}
    check(Layers().double(), given, seed=seed)


@pytest.mark.long
def test_routes_and_host_syncs_run_once() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.layers = nn.Linear(8, 4), nn.ModuleList(MLP() for _ in range(4))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).softmax(-1).topk(2)
            out = torch.zeros_like(x)
            for number, layer in enumerate(self.layers):
                rows, places = torch.where(chosen == number)
                wide = layer.down(F.gelu(layer.up(x[rows])))
                out = out.index_add(0, rows, wide * weights[rows, places, None])
            return F.cross_entropy((x + out) @ self.layers[0].up.weight.t(), y)

    given = batch()
    model = Experts().double()
    check(model, given, tiles=False)
    before = []
    for budget in (minimum(model, given), 10**8):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget)
        compiled(**given).backward()
        with roundpipe_fx.count_host_syncs() as asked:
            loss = compiled(**given)
        before.append(asked.by_operator)
        with roundpipe_fx.count_host_syncs() as asked:
            loss.backward()
        assert not asked.total
    assert before[0] == before[1]


@pytest.mark.long
def test_compiled_by_inductor() -> None:
    given = batch(dtype=torch.float32)
    model = Head()
    plain = copy.deepcopy(model)
    budget = minimum(model, given, stage_compiler="inductor")
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="inductor")
    assert_close(step(compiled, compiled, given), step(plain, plain, given), 1e-5)
