"""Steps of many kinds of models at decreasing budgets, down to the least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import roundpipe_fx
from tests.long import long_but
from tests.planner.tiled import backward_of, check

WORDS, WIDE = 512, 256
Linear = nn.Linear


@dataclass(frozen=True)
class Case:
    """A model made of a function and modules.

    Attributes:
        run: gets the modules by name and the inputs.
        parts: makes modules, parameters, and buffers, by name.
        inputs: makes inputs by name; drawn with a fixed seed.
        tiled: whether tiles are expected.
        backward: what is done with what the model returns.
    """

    run: Callable[..., Any]
    parts: Callable[[], dict[str, Any]]
    inputs: Callable[[], dict[str, torch.Tensor]]
    tiled: bool = True
    backward: Callable[[Any], torch.Tensor | None] = field(default=backward_of)


class Made(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.run = case.run
        for name, part in case.parts().items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, **inputs: torch.Tensor) -> Any:
        return self.run(self, **inputs)


def tokens() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(64, 8), "y": torch.randint(0, WORDS, (64,))}


def sequences() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 16, 8), "y": torch.randint(0, WORDS, (4, 16))}


def rows() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(64, 8)}


def pairs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(256, 8), "z": torch.randn(256, 8)}


def images() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, 4, 8, 8)}


def head_parts(bias: bool = False) -> dict[str, Any]:
    return {"body": Linear(8, 8), "head": Linear(8, WORDS, bias=bias)}


def head(
    loss: Callable[..., Any], inputs: Callable[[], dict[str, torch.Tensor]] = tokens, tiled: bool = True, **more: Any
) -> Case:
    """A loss of logits."""

    def run(s: Any, x: torch.Tensor, **labels: torch.Tensor) -> Any:
        logits = s.head(torch.tanh(s.body(x)))
        return loss(logits, *labels.values(), **{name: getattr(s, name) for name in more})

    return Case(run, lambda: {**head_parts(), **{name: make() for name, make in more.items()}}, inputs, tiled)


def mlp(
    inner: Callable[..., torch.Tensor],
    inputs: Callable[[], dict[str, torch.Tensor]] = rows,
    tiled: bool = True,
    **more: Any,
) -> Case:
    """A function of a wide value."""

    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        return s.down(inner(s.up(x), **{name: getattr(s, name) for name in more})).square().sum()

    def parts() -> dict[str, Any]:
        return {"up": Linear(8, WIDE), "down": Linear(WIDE, 8), **{name: make() for name, make in more.items()}}

    return Case(run, parts, inputs, tiled)


def attention(masked: bool = False, dropout: float = 0.0) -> Case:
    """Attention that makes its scores."""

    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.view(2, 64, 2, 8).transpose(1, 2) for part in s.qkv(x).chunk(3, -1))
        scores = query @ key.transpose(-1, -2) / 8**0.5
        if masked:
            scores = scores.masked_fill(s.mask, float("-inf"))
        weights = F.dropout(F.softmax(scores, -1), dropout)
        return s.out((weights @ value).transpose(1, 2).reshape(2, 64, 16)).square().mean()

    mask = torch.triu(torch.ones(64, 64, dtype=torch.bool), 1)
    parts = lambda: {"qkv": Linear(16, 48), "out": Linear(16, 16), "mask": mask.clone()}  # noqa: E731
    return Case(run, parts, lambda: {"x": torch.randn(2, 64, 16)})


def residual(dropout: float, layers: int = 3) -> Case:
    """MLPs without norms, one after another."""

    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        for number in range(layers):
            wide = F.dropout(F.gelu(getattr(s, f"up{number}")(x)), dropout)
            x = x + F.dropout(getattr(s, f"down{number}")(wide), dropout)
        return x.square().mean()

    def parts() -> dict[str, Any]:
        return {
            **{f"up{n}": Linear(8, WIDE) for n in range(layers)},
            **{f"down{n}": Linear(WIDE, 8) for n in range(layers)},
        }

    return Case(run, parts, lambda: {"x": torch.randn(4, 16, 8)})


def convolutions(norm: Callable[[], nn.Module] = nn.Identity, last: bool = False, tiled: bool = True) -> Case:
    def run(s: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last) if last else x
        return s.narrow(F.relu(s.depth(F.relu(s.norm(s.wide(x)))))).square().mean()

    def parts() -> dict[str, Any]:
        depth = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        found = {"wide": nn.Conv2d(4, 64, 1), "norm": norm(), "depth": depth, "narrow": nn.Conv2d(64, 4, 1)}
        return {name: m.to(memory_format=torch.channels_last) if last else m for name, m in found.items()}

    return Case(run, parts, images, tiled)


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.tanh() + x * (1 - x.tanh() ** 2))


def _divergence(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Of a student from a teacher, both of them trained."""
    x = torch.tanh(s.body(x))
    teacher = F.softmax(s.teacher(x), -1)
    return (teacher * (teacher.log() - F.log_softmax(s.head(x), -1))).sum(-1).mean()


def _distillation(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(s.body(x))
    teacher = F.log_softmax(s.teacher(x), -1).detach()
    return F.kl_div(F.log_softmax(s.head(x), -1), teacher, log_target=True, reduction="batchmean")


def _tied(s: Any, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(torch.tanh(s.body(F.embedding(t, s.words))), s.words), y)


def _gated(s: Any, x: torch.Tensor) -> torch.Tensor:
    return (s.down(F.silu(s.gate(x)) * s.up(x)) + x).square().mean()


def _dense_experts(s: Any, x: torch.Tensor) -> torch.Tensor:
    weights, chosen = torch.topk(F.softmax(s.router(x), -1), 2)
    gates = torch.zeros(64, 4).scatter(1, chosen, weights)
    wide = F.gelu(torch.einsum("td,edf->tef", x, s.up))
    return (x + torch.einsum("ted,te->td", torch.einsum("tef,efd->ted", wide, s.down), gates)).square().mean()


def _scoped(s: Any, x: torch.Tensor) -> torch.Tensor:
    with roundpipe_fx.memory_budget(0.5):
        x = x + s.down(F.gelu(s.up(x)))
    return (x + s.down(F.gelu(s.up(x)))).square().sum()


def _counting(s: Any, x: torch.Tensor) -> torch.Tensor:
    wide = F.gelu(s.up(x))
    s.count += 1
    out = s.down(wide + s.offset)
    s.total.add_(out.detach().sum(0))
    return (out * s.count).square().sum()


def _copied_buffer(s: Any, x: torch.Tensor) -> torch.Tensor:
    wide = F.gelu(s.up(x))
    s.kept.copy_(wide.detach())
    return s.down(wide * s.kept).square().sum()


def _contrast(s: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(s.one(x), dim=-1) @ F.normalize(s.other(z), dim=-1).t() * 10
    return F.cross_entropy(scores, torch.arange(x.shape[0]))


def _contrast_both_ways(s: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    scores = F.normalize(s.one(x), dim=-1) @ F.normalize(s.other(z), dim=-1).t() * s.scale.exp()
    labels = torch.arange(x.shape[0])
    return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.t(), labels)) / 2


def _several_words(s: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return sum(F.cross_entropy(s.head(x * (n + 1)), y.roll(n)) for n in range(3))  # type: ignore[return-value]


def _checkpointed_mlp(s: Any, x: torch.Tensor) -> torch.Tensor:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return s.down(F.dropout(F.gelu(s.up(x)), 0.2))

    return checkpoint(layer, x, use_reentrant=False).square().sum()


def _checkpointed_head(s: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(s.head(x), y)

    return checkpoint(loss, torch.tanh(s.body(x)), use_reentrant=False)


def _other_term(s: Any, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    hidden = s.body(x)
    return {"loss": F.cross_entropy(s.head(torch.tanh(hidden)), y), "other": hidden.square().mean()}


def _scaled_and_added(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = outputs["loss"] * 0.3 + outputs["other"]
    loss.backward()
    return loss.detach().clone()


def gated_parts() -> dict[str, Any]:
    return {
        name: Linear(*sizes, bias=False)
        for name, sizes in (("gate", (8, WIDE)), ("up", (8, WIDE)), ("down", (WIDE, 8)))
    }


def mlp_parts(**more: torch.Tensor) -> dict[str, Any]:
    return {"up": Linear(8, WIDE, bias=False), "down": Linear(WIDE, 8, bias=False), **more}


def teachers() -> dict[str, Any]:
    return {**head_parts(), "teacher": Linear(8, WORDS, bias=False)}


def towers() -> dict[str, Any]:
    return {"one": Linear(8, 4), "other": Linear(8, 4), "scale": nn.Parameter(torch.tensor(1.0))}


def expert_parts() -> dict[str, Any]:
    up, down = nn.Parameter(torch.randn(4, 8, WIDE)), nn.Parameter(torch.randn(4, WIDE, 8) / 16)
    return {"router": Linear(8, 4), "up": up, "down": down}


def chosen(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(-1).gather(-1, y[..., None]).mean()


def each(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, y, reduction="none")


CASES: dict[str, Case] = {
    # losses of logits
    "cross entropy": head(F.cross_entropy),
    "of sequences": head(lambda h, y: F.cross_entropy(h.view(-1, WORDS), y.view(-1)), sequences),
    "of transposed sequences": head(lambda h, y: F.cross_entropy(h.transpose(1, 2), y), sequences),
    "of all but the last of each sequence": head(
        lambda h, y: F.cross_entropy(h[:, :-1].reshape(-1, WORDS), y[:, 1:].reshape(-1)), sequences
    ),
    "of all but the first, transposed, soft cap": head(
        lambda h, y: F.cross_entropy((9 * torch.tanh(h / 9)).transpose(1, 2)[..., 1:], y[:, :-1]), sequences
    ),
    "a sum": head(lambda h, y: F.cross_entropy(h, y, reduction="sum")),
    "of each row": head(lambda h, y: each(h, y).mean()),
    "of weighted rows": head(lambda h, y: (each(h, y) * torch.arange(64.0)).sum() / 64),
    "of masked rows": head(lambda h, y: (each(h, y) * (y > 100)).sum() / (y > 100).sum()),
    "deviation of rows": head(lambda h, y: each(h, y).std()),
    "square of a mean": head(lambda h, y: each(h, y).mean() ** 2),
    "of one element, two dimensions": head(lambda h, y: each(h, y).sum(0, keepdim=True).view(1, 1)),
    "label smoothing": head(lambda h, y: F.cross_entropy(h, y, label_smoothing=0.1)),
    "class weights": head(lambda h, y, w: F.cross_entropy(h, y, weight=w), w=lambda: torch.rand(WORDS)),
    "both": head(lambda h, y, w: F.cross_entropy(h, y, weight=w, label_smoothing=0.1), w=lambda: torch.rand(WORDS)),
    "ignored": head(lambda h, y: F.cross_entropy(h, torch.where(y % 3 == 0, -100, y))),
    "normalizer": head(lambda h, y: F.cross_entropy(h, y) + 1e-2 * torch.logsumexp(h, -1).square().mean()),
    "soft cap": head(lambda h, y: F.cross_entropy(30 * torch.tanh(h / 30), y)),
    "temperature": head(lambda h, y, t: F.cross_entropy(h * t, y), t=lambda: nn.Parameter(torch.tensor(1.3))),
    "gathered": head(chosen),
    "binary": head(lambda h, y: F.binary_cross_entropy_with_logits(h, torch.full_like(h, 0.3))),
    "squares": head(lambda h, t: F.mse_loss(h, t), lambda: {"x": torch.randn(64, 8), "t": torch.randn(64, WORDS)}),
    "smooth distances": head(
        lambda h, t: F.smooth_l1_loss(h, t) + F.huber_loss(h, t),
        lambda: {"x": torch.randn(64, 8), "t": torch.randn(64, WORDS)},
    ),
    "rounded": head(lambda h, y: torch.div(h.exp(), 2, rounding_mode="trunc").sum() + F.cross_entropy(h, y)),
    "of the best guess": head(lambda h, y: F.cross_entropy(h, h.argmax(-1)), tiled=False),
    "largest logits": head(lambda h, y: h.topk(4, -1).values.sum(), tiled=False),
    "product of losses": head(lambda h, y: F.cross_entropy(h, y) * F.cross_entropy(h * 2, y)),
    "with a bias": Case(lambda s, x, y: F.cross_entropy(s.head(s.body(x)), y), lambda: head_parts(bias=True), tokens),
    "distillation": Case(_distillation, teachers, rows),
    "divergence of two heads": Case(_divergence, teachers, rows),
    "tied": Case(
        _tied,
        lambda: {"body": Linear(8, 8), "words": nn.Parameter(torch.randn(WORDS, 8))},
        lambda: {"t": torch.randint(0, WORDS, (64,)), "y": torch.randint(0, WORDS, (64,))},
    ),
    "several words ahead": Case(_several_words, head_parts, tokens),
    "another term": Case(_other_term, head_parts, tokens, backward=_scaled_and_added),
    "checkpointed head": Case(_checkpointed_head, head_parts, tokens),
    "contrast": Case(_contrast, towers, pairs),
    "contrast both ways": Case(_contrast_both_ways, towers, pairs, tiled=False),
    # wide values
    "gelu": mlp(F.gelu),
    "dropout": mlp(lambda h: F.dropout(F.gelu(h), 0.2)),
    "layer norm": mlp(lambda h: F.layer_norm(F.gelu(h), (WIDE,))),
    "rms norm": mlp(lambda h, w: F.rms_norm(h, (WIDE,), w), w=lambda: nn.Parameter(torch.randn(WIDE))),
    "scaled": mlp(lambda h, w: F.gelu(h) * w, w=lambda: nn.Parameter(torch.randn(WIDE))),
    "custom": mlp(lambda h: Squared.apply(h)),
    "sums over rows": mlp(lambda h: h - torch.tanh(h).sum(0), tiled=False),
    "softmax over rows": mlp(lambda h: torch.exp(h) / torch.exp(h).sum(0), tiled=False),
    "running sums over rows": mlp(lambda h: h.cumsum(0).tanh(), tiled=False),
    "gated": Case(_gated, gated_parts, lambda: {"x": torch.randn(4, 16, 8)}),
    "halves": Case(
        lambda s, x: s.down(F.glu(s.up(x), -1)).square().sum(),
        lambda: {"up": Linear(8, 2 * WIDE), "down": Linear(WIDE, 8)},
        rows,
    ),
    "residual": residual(0.0),
    "residual dropout": residual(0.1),
    "checkpointed": Case(_checkpointed_mlp, mlp_parts, rows),
    "scoped": Case(_scoped, mlp_parts, rows),
    "counting": Case(
        _counting,
        lambda: mlp_parts(count=torch.zeros((), dtype=torch.int64), offset=torch.ones(WIDE), total=torch.zeros(8)),
        rows,
    ),
    "a mean over images": Case(
        lambda s, x, y: F.cross_entropy(s.head(x).permute(0, 3, 1, 2), y, reduction="none").sum((1, 2)).square().mean(),
        lambda: {"head": Linear(8, WORDS)},
        lambda: {"x": torch.randn(3, 5, 4, 8), "y": torch.randint(0, WORDS, (3, 5, 4))},
    ),
    "copied to a buffer": Case(_copied_buffer, lambda: mlp_parts(kept=torch.zeros(64, WIDE)), rows),
    "experts": Case(_dense_experts, expert_parts, rows),
    "outer product": Case(
        lambda s, x: (s.one(x)[:, None, :] * s.other(x)[None, :, :]).tanh().sum(-1).square().sum(),
        lambda: {"one": Linear(8, 16), "other": Linear(8, 16)},
        rows,
    ),
    "attention": attention(),
    "masked attention": attention(masked=True),
    "attention dropout": attention(masked=True, dropout=0.2),
    "convolutions": convolutions(),
    "channels last": convolutions(last=True),
    "group norm": convolutions(lambda: nn.GroupNorm(4, 64)),
    "batch norm": convolutions(lambda: nn.BatchNorm2d(64), tiled=False),
}

QUICK = {"cross entropy", "label smoothing", "binary", "tied", "dropout", "sums over rows", "attention dropout"}


@pytest.fixture(autouse=True)
def _precise():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", long_but(CASES, quick=QUICK))
@pytest.mark.long
def test_decreasing_budgets(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    outcomes = check(Made(case), inputs, case.backward, tiles=case.tiled)
    for outcome in outcomes:
        assert outcome.measured <= outcome.planned <= outcome.measured * 1.03 + 64
    if case.tiled:
        assert outcomes[-1].budget < 0.9 * (outcomes[0].budget + 1)


@pytest.mark.parametrize("name", ["cross entropy", "soft cap", "gelu", "attention"])
@pytest.mark.long
def test_in_single_precision(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    case = CASES[name]
    check(Made(case), case.inputs(), case.backward)
