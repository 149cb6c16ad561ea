"""Loss heads in tiles of their classes, forced upon them or where a budget asks for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from benchmarks.fuzz.tiles import tiled_passes
from roundpipe_fx.codegen.loop_text import list_loops
from tests.cross_entropies import CROSS_ENTROPIES
from tests.hugging_face import bert, gpt2, language_batch, llama, t5
from tests.planner.tiled import TOLERANCE, assert_close, assert_no_worse, check, minimum, step
from tests.planner.tiled_models import WORDS, Head, batch, gradients

WIDTH = 8


class Wide(nn.Module):
    """A head with many more words than rows or columns."""

    def __init__(self, words: int = 4096) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.body(x))).float(), y)


def rows_of_words(count: int, dtype: torch.dtype, words: int = 4096) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(count, WIDTH, dtype=dtype), "y": torch.randint(0, words, (count,))}


def is_by_class(compiled: roundpipe_fx.CompiledModule) -> bool:
    """Whether a log-sum-exp is made of tiles."""
    loops = [loop for module in compiled.plan.modules for loop in list_loops(module.module.graph)]
    return any(result.is_logarithm for loop in loops for result in loop.results)


def without_classes(monkeypatch: pytest.MonkeyPatch, model: nn.Module, given: dict[str, Any]) -> int:
    """The least budget that tiles of rows reach."""
    with monkeypatch.context() as patched:
        patched.setattr("roundpipe_fx.planner.region_classes.find_vocabulary_regions", lambda *_: [])
        return minimum(model, given)


@pytest.mark.parametrize("count", [4, 256])
@pytest.mark.long
def test_gradients_in_half_precision_are_not_summed(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiles of rows, a weight's gradient is a sum in single precision; with tiles of words it is itself."""
    model, given = Wide().bfloat16(), rows_of_words(count, torch.bfloat16)
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    plain(**given).backward()
    exact.forward = lambda x, y: F.cross_entropy(exact.head(torch.tanh(exact.body(x))), y)  # type: ignore[method-assign]
    exact(x=given["x"].double(), y=given["y"]).backward()
    by_rows, budget = without_classes(monkeypatch, model, given), minimum(model, given)
    assert budget < (0.5 if count > WIDTH else 0.9) * by_rows
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**given).backward()
    assert is_by_class(compiled) and peak.bytes == compiled.plan.peak_bytes <= budget
    assert_no_worse(gradients(compiled), gradients(plain), gradients(exact))


@pytest.mark.parametrize(("count", "width", "words"), [(32_768, 2048, 65_536), (16_384, 512, 16_384)])
def test_the_quicker_tiles_are_taken(count: int, width: int, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of a gradient are read and written for each tile of rows; logits are made twice with tiles of words."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(x).float(), y)

    with torch.device("meta"):
        model = Last().bfloat16()
        x = torch.empty(count, width, dtype=torch.bfloat16, requires_grad=True)
        y = torch.empty(count, dtype=torch.long)
    budget = 3 * model.head.weight.nbytes + 2 * x.nbytes + (count * words * 4) // 8
    seconds = []
    for is_patched in (False, True):
        torch._dynamo.reset()
        with monkeypatch.context() as patched:
            if is_patched:
                patched.setattr("roundpipe_fx.planner.region_classes.find_vocabulary_regions", lambda *_: [])
            plan = roundpipe_fx.plan(model, x, y, device="H100", memory_budget=budget)
        loops = [loop for module in plan.modules for loop in list_loops(module.module.graph)]
        is_by_class = any(result.is_logarithm for loop in loops for result in loop.results)
        assert loops and is_by_class == (words == 65_536 and not is_patched)
        stages = plan.stages
        seconds.append(sum(one.forward_seconds + one.recompute_seconds + one.backward_seconds for one in stages))
    assert seconds[0] <= seconds[1] * (0.9 if words == 65_536 else 1)


@pytest.mark.long
def test_few_rows() -> None:
    """Fewer rows than the head has columns: its weight is larger than the logits."""
    model = Wide(1 << 14)
    given = rows_of_words(6, torch.float32, 1 << 14)
    found = check(model, given, asked=[minimum(model, given)])
    gradient = model.head.weight.nbytes
    assert found[0].measured < 1.2 * gradient, "only the gradient exists as a whole"


class OfLoss(nn.Module):
    """A head with one of the losses that can be written with sums over classes."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 40)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(torch.tanh(self.body(x))), y)


def labelled() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, 40, (2, 5))
    labels[0, 1] = labels[1, 3] = -100
    return {"x": torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True), "y": labels}


@pytest.mark.parametrize("tiles", [2, 3, 40])
@pytest.mark.parametrize("name", CROSS_ENTROPIES)
@pytest.mark.quick_every(6)
def test_losses(name: str, tiles: int) -> None:
    """40 classes in tiles that divide them, that do not, and of one class each; hooks and inputs get gradients."""
    model, given = OfLoss(CROSS_ENTROPIES[name]).double(), labelled()
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(tiles, by_class=True))
    assert_close(step(compiled, own, given), expected, TOLERANCE[torch.float64])
    assert is_by_class(compiled)


def test_labels_that_are_all_ignored() -> None:
    """The mean over nothing is NaN, and gradients are zero, as without tiles."""
    model, given = OfLoss(CROSS_ENTROPIES["mean"]).double(), labelled()
    given["y"] = torch.full_like(given["y"], -100)
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(4, by_class=True))
    assert_close(step(compiled, own, given), expected, TOLERANCE[torch.float64])
    assert expected.loss is not None and expected.loss.isnan() and is_by_class(compiled)


@pytest.mark.parametrize("label", [40, -1])
def test_labels_out_of_range_are_an_error(label: int) -> None:
    model, given = OfLoss(CROSS_ENTROPIES["mean"]).double(), labelled()
    compiled = roundpipe_fx.compile(model, memory_budget=1.0, passes=tiled_passes(4, by_class=True))
    compiled(**given).backward()
    assert is_by_class(compiled)
    given["y"] = given["y"].clone().fill_(label)
    with pytest.raises(IndexError):
        compiled(**given)


def test_scores_that_are_infinite() -> None:
    """Classes that a mask leaves out have no probability; a tile may have no others."""

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        allowed = torch.arange(40) % 20 < 7
        scores = scores.masked_fill(~allowed, float("-inf"))
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten() % 7)

    model, given = OfLoss(loss).double(), labelled()
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(8, by_class=True))
    found = step(compiled, own, given)
    assert is_by_class(compiled) and expected.loss is not None and expected.loss.isfinite()
    assert_close(found, expected, TOLERANCE[torch.float64])


def test_large_scores_do_not_overflow() -> None:
    model, given = OfLoss(lambda scores, labels: CROSS_ENTROPIES["mean"](scores * 1e4, labels)).double(), labelled()
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(5, by_class=True))
    assert_close(step(compiled, own, given), expected, TOLERANCE[torch.float64])


@pytest.mark.parametrize(("scale", "tiles"), [(1.0, 512), (8.0, 512), (60.0, 16)])
def test_in_single_precision(scale: float, tiles: int) -> None:
    """Also with large scores, whose log-sum-exp has few digits behind the point."""

    class Scaled(Wide):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(scale * self.head(torch.tanh(self.body(x))), y)

    model, given = Scaled(2048), rows_of_words(64, torch.float32, 2048)
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(tiles, by_class=True))
    assert_close(step(compiled, own, given), expected, TOLERANCE[torch.float32])
    assert is_by_class(compiled)


@pytest.mark.parametrize("auto", [None, "auto"])
@pytest.mark.long
def test_tied_weights_and_a_budget(auto: str | None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body = nn.Embedding(512, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.body(self.words(y)))
            scores = 3 * torch.tanh(F.linear(hidden, self.words.weight) / 3)
            return F.cross_entropy(scores.float().flatten(0, 1), y.roll(-1, 1).flatten())

    model, given = Tied().bfloat16(), {"y": torch.randint(0, 512, (4, 64))}
    plain, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    plain(**given).backward()
    exact(**given).backward()
    budget = minimum(model, given)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, tiling=auto)
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**given).backward()
    assert is_by_class(compiled) and peak.bytes <= budget
    assert_no_worse(gradients(compiled), gradients(plain), gradients(exact))


@pytest.mark.long
def test_compiled_by_inductor() -> None:
    model, given = Head(), batch(dtype=torch.float32)
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    passes = tiled_passes(WORDS // 32, by_class=True)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=passes, stage_compiler="inductor")
    assert_close(step(compiled, own, given), expected, 1e-5)
    assert is_by_class(compiled)


@pytest.mark.long
def test_in_a_pipeline() -> None:
    """The last stage's head, where no tiles of rows keep the budget."""
    model, given = Wide().bfloat16(), rows_of_words(256, torch.bfloat16)
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "num_microbatches": 2, "stages": 2}
    plain = copy.deepcopy(model)
    roundpipe_fx.compile(plain, **options).forward_backward(**given)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(copy.deepcopy(model), memory_budget=1, **options).forward_backward(**given)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=refused.value.minimum, **options)
    compiled.forward_backward(**given)
    assert is_by_class(compiled)
    exact = copy.deepcopy(plain).double()
    exact.zero_grad()
    F.cross_entropy(exact.head(torch.tanh(exact.body(given["x"].double()))), given["y"]).backward()
    true = gradients(exact)
    for found in (gradients(compiled), gradients(plain)):
        errors = [(own.double() - other).norm() for own, other in zip(found, true, strict=True)]
        assert max(errors) <= 2.0**-8 * max(gradient.norm() for gradient in true)


@pytest.mark.long
@pytest.mark.parametrize("make", [gpt2, llama, bert, t5])
def test_language_models(make: Callable[[], nn.Module]) -> None:
    """Everything in tiles, the head in tiles of its words."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = make()

        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(**given).loss
            return loss

    torch.manual_seed(0)
    model, given = Loss().train(), language_batch(8, 16)
    given["labels"] = given["labels"].clone()
    given["labels"][0, :5] = -100
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(7, by_class=True))
    assert_close(step(compiled, own, given), expected, TOLERANCE[torch.float32])
    assert is_by_class(compiled)


class Adapted(nn.Module):
    """A frozen head with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64, bias=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 64, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return F.cross_entropy(self.head(hidden) + self.up(self.down(hidden)), y)


class Returning(nn.Module):
    """The logits are returned, and differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.head(torch.tanh(self.body(x)))
        return {"loss": F.cross_entropy(scores, y), "scores": scores}


class Two(nn.Module):
    """Two heads of different sizes, and two losses of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.words, self.kinds = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 96, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        scores, others = self.words(hidden), 5 * torch.tanh(self.kinds(hidden) / 5)
        normalizer = 1e-2 * torch.logsumexp(scores, -1).square().mean()
        losses = F.cross_entropy(scores, y) + F.cross_entropy(scores / 2, y.flip(0), label_smoothing=0.1)
        return losses + 3 * F.cross_entropy(others, y + 32, reduction="none").square().mean() + normalizer


@pytest.mark.parametrize("make", [Adapted, Two, Returning])
@pytest.mark.parametrize("tiles", [2, 5])
def test_heads(make: Callable[[], nn.Module], tiles: int) -> None:
    torch.manual_seed(0)
    model, given = make().double(), rows_of_words(40, torch.float64, 64)
    both = make is Returning

    def backward(output: Any) -> torch.Tensor:
        loss = output["loss"] + output["scores"].square().mean() if both else output
        loss.backward()
        return loss.detach().clone()

    expected = step(model, model, given, backward)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(tiles, by_class=True))
    assert_close(step(compiled, own, given, backward), expected, TOLERANCE[torch.float64])
    assert is_by_class(compiled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The loss is in float32 there, also where products are in half precision."""
    model, given = Head(), batch(dtype=torch.float32)
    exact, plain = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact(given["x"].double(), given["y"]).backward()
    compiled = roundpipe_fx.compile(model, memory_budget=1.0, passes=tiled_passes(4, by_class=True))
    for run in (plain, compiled):
        with torch.autocast("cpu", dtype):
            loss = run(**given)
        loss.backward()
    assert is_by_class(compiled)
    assert_no_worse(gradients(model), gradients(plain), gradients(exact))


def test_hooks_on_the_head() -> None:
    model, given = Head().double(), batch()
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, args, output: output * 2)
    expected = step(model, model, given)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    own.head.weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient)
    compiled = roundpipe_fx.compile(own, memory_budget=1.0, passes=tiled_passes(4, by_class=True))
    assert_close(step(compiled, own, given), expected, TOLERANCE[torch.float64])
    assert is_by_class(compiled) and torch.equal(seen[0], own.head.weight.grad)
