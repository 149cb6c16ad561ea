"""Bad input and odd use of steps that only tiles make fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from tests.compiler.tiled import assert_close, check, is_tiled, minimum, step

WORDS = 256


class Head(nn.Module):
    """A small language model's end: a layer, logits, and a loss."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))) * self.scale, y)


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 256), nn.Linear(256, 8), dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.dropout(F.gelu(self.up(x)), self.dropout, self.training)
        return (x + self.down(wide)).square().mean()


def batch(rows: int = 64, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 8, dtype=dtype), "y": torch.randint(0, WORDS, (rows,))}


def least(model: nn.Module, given: dict[str, torch.Tensor], **options: Any) -> roundpipe_fx.CompiledModule:
    """The model compiled for the least budget; in tiles."""
    budget = minimum(model, given, **options)
    torch._dynamo.reset()
    return roundpipe_fx.compile(model, memory_budget=budget, **options)


def both(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[nn.Module, roundpipe_fx.CompiledModule]:
    """A copy of the model, and the model compiled."""
    plain = copy.deepcopy(model)
    return plain, least(model, given)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    largest = max(g.double().norm() for g in expected)
    for own, other in zip(found, expected, strict=True):
        assert (own.double() - other.double()).norm() <= tolerance * largest


USES: dict[str, Callable[[Any], Any]] = {
    "scaled": lambda loss: (loss * 0.3).backward(),
    "used twice": lambda loss: (loss * loss + loss.exp()).backward(),
    "given a gradient": lambda loss: loss.backward(gradient=torch.tensor(-2.5, dtype=loss.dtype)),
    "given zero": lambda loss: loss.backward(gradient=torch.zeros_like(loss)),
    "with a penalty": lambda loss: (loss + 0.1 * loss.detach() * loss).backward(),
}


@pytest.mark.parametrize("use", USES)
def test_a_loss_is_used_in_any_way(use: str) -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    for _ in range(2):
        USES[use](plain(**given))
        USES[use](compiled(**given))
    assert is_tiled(compiled)
    assert_near(gradients(compiled), gradients(plain))


def test_several_losses() -> None:
    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Head(), Head()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"one": self.one(x, y), "other": self.other(x, y)}

    given = batch()

    def backward(losses: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = losses["one"] * 0.3 + losses["other"] * 2
        loss.backward()
        return loss.detach().clone()

    check(Losses().double(), given, backward)


def test_one_of_two_losses_is_not_differentiated() -> None:
    class Losses(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x, y), super().forward(x * 2, y)

    given = batch()
    plain, compiled = both(Losses().double(), given)
    for run in (plain, compiled):
        run(**given)[0].backward()
    assert_near(gradients(compiled), gradients(plain))


def test_gradients_accumulate() -> None:
    model = Head().double()
    batches = [batch(), batch()]
    plain = copy.deepcopy(model)
    # Gradients of the first call are there already in the second, which is none of the step's own.
    compiled = least(model, batches[0])
    for given in batches * 2:
        (plain(**given) / 2).backward()
        (compiled(**given) / 2).backward()
    assert is_tiled(compiled)
    assert_near(gradients(compiled), gradients(plain))


def test_the_backward_twice() -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    for run in (plain, compiled):
        loss = run(**given)
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_near(gradients(compiled), gradients(plain))


def test_two_calls_alive_at_once() -> None:
    batches = [batch(), batch()]
    model = Head().double()
    plain = copy.deepcopy(model)
    (plain(**batches[0]) + plain(**batches[1])).backward()
    compiled = roundpipe_fx.compile(model, memory_budget=4 * minimum(model, batches[0]), tiling="auto")
    for _ in range(2):
        compiled.zero_grad()
        (compiled(**batches[0]) + compiled(**batches[1])).backward()
    assert_near(gradients(compiled), gradients(plain))


def test_a_gradient_scaler() -> None:
    given = batch(dtype=torch.float32)
    plain, compiled = both(Head(), given)
    left = []
    for run in (plain, compiled):
        optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(run(**given)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(run.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        left.append([p.detach().clone() for p in run.parameters()])
    assert_near(left[1], left[0], 1e-6)


def test_without_gradients() -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    with torch.no_grad():
        assert torch.allclose(compiled(**given), plain(**given), rtol=1e-12)
    compiled(**given).backward()
    with torch.inference_mode():
        assert torch.allclose(compiled(**given), plain(**given), rtol=1e-12)
    plain(**given).backward()
    assert_near(gradients(compiled), gradients(plain))


def test_eval_and_train() -> None:
    given = {"x": torch.randn(64, 8, dtype=torch.float64)}
    plain, compiled = both(MLP(0.3).double(), given)
    for mode in (True, False, True):
        plain.train(mode)
        compiled.train(mode)
        assert_close(step(compiled, compiled, given, seed=3), step(plain, plain, given, seed=3), 1e-12)


def test_training_goes_on() -> None:
    given = {"x": torch.randn(64, 8, dtype=torch.float64)}
    plain, compiled = both(MLP(0.3).double(), given)
    for run in (plain, compiled):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(run.parameters(), lr=0.01)
        for _ in range(4):
            optimizer.zero_grad()
            run(**given).backward()
            optimizer.step()
    for own, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, rtol=1e-9, atol=1e-12)


def test_rows_that_tiles_do_not_divide() -> None:
    for rows in (61, 63, 3):
        check(Head().double(), batch(rows), tiles=rows > 3)


def test_one_row_and_none() -> None:
    check(Head().double(), batch(1), tiles=False)
    check(Head().double(), batch(0), tiles=False)
    check(MLP().double(), {"x": torch.randn(0, 8, dtype=torch.float64)}, tiles=False)


def test_other_batches_are_planned_anew() -> None:
    given = batch(64)
    plain, compiled = both(Head().double(), given)
    compiled(**given).backward()
    try:  # rows of any number are not divided
        assert_close(step(compiled, compiled, other := batch(32)), step(plain, plain, other), 1e-12)
    except roundpipe_fx.InfeasibleBudgetError as refused:
        assert refused.minimum > compiled.plan.peak_bytes
    assert_close(step(compiled, compiled, given), step(plain, plain, given), 1e-12)


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


def test_labels_that_are_ignored() -> None:
    given = batch()
    some = given["y"].clone()
    some[::3] = -100
    check(Head().double(), {**given, "y": some})
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


class WithLogits(Head):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.body(x)))
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_logits_that_are_returned() -> None:
    given = batch()
    model = WithLogits().double()
    outcomes = check(model, given)
    assert outcomes[-1].planned >= 64 * WORDS * 8
    compiled = least(copy.deepcopy(model), given)
    assert torch.allclose(compiled(**given)["logits"], model(**given)["logits"], rtol=1e-12, atol=1e-12)


def test_logits_that_are_differentiated() -> None:
    given = batch()

    def backward(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = outputs["loss"] + outputs["logits"].square().mean()
        loss.backward()
        return loss.detach().clone()

    model = WithLogits().double()
    compiled = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=10 * 64 * WORDS * 8)
    backward(compiled(**given))
    backward(compiled(**given))
    budget = compiled.plan.peak_bytes
    check(model, given, backward, asked=[budget], tiles=False)


def test_hooks_on_the_head() -> None:
    given = batch()
    model = Head().double()
    seen: list[float] = []
    plain = copy.deepcopy(model)
    for one in (plain, model):
        one.head.register_forward_hook(lambda module, args, output: output * 1.5)
        one.head.weight.register_hook(lambda gradient: gradient * 2)
        one.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    compiled = least(model, given)
    for run in (plain, compiled):
        run(**given).backward()
    assert is_tiled(compiled)
    assert len(seen) == 2 and abs(seen[0] - seen[1]) < 1e-12 * seen[0]
    assert_near(gradients(compiled), gradients(plain))


def test_tensor_hooks_on_logits() -> None:
    class Hooked(Head):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(torch.tanh(self.body(x)))
            logits.register_hook(lambda gradient: gradient * 3)
            return F.cross_entropy(logits, y)

    check(Hooked().double(), batch())


@pytest.mark.filterwarnings("ignore")
def test_backward_hooks_on_the_head() -> None:
    given = batch()
    model = Head().double()
    plain = copy.deepcopy(model)
    for one in (plain, model):
        one.head.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    compiled = roundpipe_fx.compile(model, memory_budget=8 * 64 * WORDS * 8, tiling="auto")
    for run in (plain, compiled):
        run(**given).backward()
    assert_near(gradients(compiled), gradients(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
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


def assert_no_worse(found: list[torch.Tensor], plain: list[torch.Tensor], exact: list[torch.Tensor]) -> None:
    """Rounding is as without tiles: errors against exact gradients are at most half as large again."""
    largest = max(g.norm() for g in exact)
    for own, other, true in zip(found, plain, exact, strict=True):
        error, allowed = (own.double() - true).norm(), (other.double() - true).norm()
        assert error <= 1.5 * allowed + 1e-6 * largest, f"{float(error)}, without tiles {float(allowed)}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["head", "upcast", "mlp"])
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


def test_frozen_heads_and_adapters() -> None:
    model = Head().double()
    model.head.requires_grad_(False)
    check(model, batch())
    model.body.requires_grad_(False)
    x = torch.randn(64, 8, dtype=torch.float64, requires_grad=True)
    check(model, {**batch(), "x": x})


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


def test_copies_and_pickles() -> None:
    given = batch()
    plain, compiled = both(Head().double(), given)
    compiled(**given)
    assert is_tiled(compiled)
    expected = step(plain, plain, given)
    copied = copy.deepcopy(compiled)
    torch._dynamo.reset()
    assert_close(step(copied, copied, given), expected, 1e-12)
    loaded = pickle.loads(pickle.dumps(compiled))
    assert_close(step(loaded, loaded, given), expected, 1e-12)
    assert is_tiled(copied)


def test_the_torch_compile_backend() -> None:
    given = batch()
    model = Head().double()
    budget = minimum(model, given)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": budget})
    assert_close(step(compiled, model, given), step(plain, plain, given), 1e-12)
    torch._dynamo.reset()
    refused = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": budget, "tiling": "never"})
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        refused(**given)


def test_options_that_are_wrong() -> None:
    with pytest.raises(ValueError, match="'auto', 'never'"):
        roundpipe_fx.compile(Head(), memory_budget=1.0, tiling="always")
    with pytest.raises(ValueError, match="recompute"):
        roundpipe_fx.compile(Head(), recompute="full", tiling="auto")
    with pytest.raises(ValueError):
        roundpipe_fx.compile(Head(), memory_budget=1.0, tiling=4)  # type: ignore[arg-type]


def test_never_is_refused_as_without_tiles() -> None:
    given = batch()
    model = Head().double()
    assert minimum(model, given, tiling="never") > 2 * minimum(model, given)
    assert minimum(model, given, tiling="never") > 64 * WORDS * 8


def test_shares_are_not_tiled() -> None:
    given = batch()
    for share in (0.0, 0.5, 1.0):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(Head().double(), memory_budget=share)
        compiled(**given).backward()
        assert not is_tiled(compiled)


def _modelled(
    model: nn.Module, given: dict[str, torch.Tensor], budget: int | float, **options: Any
) -> tuple[float, int]:
    torch._dynamo.reset()
    plan = roundpipe_fx.compile(copy.deepcopy(model), memory_budget=budget, **options).trace(**given)
    seconds = sum(s.forward_seconds + s.backward_seconds + s.recompute_seconds for s in plan.stages)
    return seconds, plan.peak_bytes


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(3))
        self.head = Head()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.down(F.gelu(layer.up(x)))
        return self.head(x, y)


def test_wherever_it_pays_a_step_is_not_slower() -> None:
    given = batch()
    model = Deep().double()
    lowest = minimum(model, given, tiling="never")
    for budget in (0.0, 0.1, 0.4, 0.8, 1.0, lowest, lowest + lowest // 4):
        seconds, peak = _modelled(model, given, budget, tiling="auto")
        plain_seconds, _ = _modelled(model, given, budget, tiling="never")
        assert seconds <= plain_seconds * (1 + 1e-9)
        if isinstance(budget, int):
            assert peak <= budget


def test_several_budgets_in_one_process() -> None:
    given = batch()
    model = Deep().double()
    low, high = minimum(model, given), minimum(model, given, tiling="never")
    torch._dynamo.reset()
    models = [copy.deepcopy(model) for _ in range(3)]
    compiled = [
        roundpipe_fx.compile(one, memory_budget=b) for one, b in zip(models, (low, high, high - 1), strict=True)
    ]
    expected = step(model, model, given)
    for _ in range(2):
        for one in compiled:
            assert_close(step(one, one, given), expected, 1e-12)
    assert [is_tiled(one) for one in compiled] == [True, False, True]


def test_the_text_of_a_plan_runs() -> None:
    given = batch(61)
    compiled = least(Deep().double(), given)
    compiled(**given).backward()
    sources = compiled.plan.sources()
    ran = 0
    for module in compiled.plan.modules:
        text = sources[f"stage_{module.stage}.{module.phase}.py"]
        if text.startswith("#"):
            continue
        inputs = [node.meta["val"] for node in module.module.graph.find_nodes(op="placeholder")]
        arguments = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).uniform_(0.1, 1)
            if v.is_floating_point()
            else torch.zeros(v.shape, dtype=v.dtype)
            for v in inputs
        ]
        namespace: dict[str, Any] = {}
        exec(text, namespace)
        expected = module.module([a.clone() for a in arguments])
        found = namespace[module.name]([a.clone() for a in arguments])
        assert all(torch.equal(own, other) for own, other in zip(found, expected, strict=True))
        ran += "for start in range" in text
    assert ran


def test_graphs_are_written_after_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_DUMP", str(tmp_path))
    given = batch()
    compiled = least(Head().double(), given)
    compiled(**given).backward()
    written = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert any("tiles" in name for name in written), sorted(written)


def test_masks_are_drawn_as_without_tiles() -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = MLP(0.5), MLP(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.dropout(x, 0.1, self.training)
            return self.one(x) + self.two(x) * torch.rand_like(x).mean()

    given = {"x": torch.randn(64, 8, dtype=torch.float64)}
    for seed in (0, 7):
        check(Layers().double(), given, seed=seed)


def test_routes_and_questions_are_asked_once() -> None:
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
