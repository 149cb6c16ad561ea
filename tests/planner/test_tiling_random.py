"""Random modules of operations on rows around wide values, all of them in tiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from benchmarks.fuzz.tiles import tiled_passes
from tests.planner.tiled import assert_close, is_tiled, step

WIDTH, WIDE = 6, 48

Piece = Callable[[torch.Tensor, nn.Parameter], torch.Tensor]

ON_WIDE: dict[str, Piece] = {
    "gelu": lambda h, w: F.gelu(h),
    "gate": lambda h, w: F.silu(h) * (h + w),
    "scale": lambda h, w: h * w,
    "dropout": lambda h, w: F.dropout(h, 0.3),
    "norm": lambda h, w: F.layer_norm(h, (WIDE,), w),
    "softmax": lambda h, w: F.softmax(h * w, -1),
    "log softmax": lambda h, w: F.log_softmax(h, -1),
    "softmax over rows": lambda h, w: F.softmax(h, 0),
    "centre": lambda h, w: h - h.mean(-1, keepdim=True),
    "centre rows": lambda h, w: h - torch.tanh(h).sum(0),
    "cap": lambda h, w: 5 * torch.tanh(h / 5),
    "mask": lambda h, w: h.masked_fill(h < -1, 0.0),
    "largest": lambda h, w: h / (1 + h.abs().amax(-1, keepdim=True)),
    "halves": lambda h, w: torch.cat([h[..., : WIDE // 2] * 2, h[..., WIDE // 2 :].sin()], -1),
    "heads": lambda h, w: (h.unflatten(-1, (4, WIDE // 4)).softmax(-1) * 3).flatten(-2),
    "turned": lambda h, w: h.transpose(0, 1).exp().clamp(max=3).transpose(0, 1),
    "flat": lambda h, w: h.reshape(-1, WIDE).sigmoid().reshape(h.shape),
    "sorted": lambda h, w: h.sort(-1).values,
    "rolled": lambda h, w: h + h.roll(1, 0),
    "residual": lambda h, w: h + 0.5 * h.detach() * w,
    "convolution": lambda h, w: F.conv1d(h.reshape(-1, 1, WIDE), w[None, None, :3], padding=1).reshape(h.shape),
}
LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross entropy": lambda h, y: F.cross_entropy(h.flatten(0, -2), y.flatten()),
    "smoothed": lambda h, y: F.cross_entropy(h.flatten(0, -2), y.flatten(), label_smoothing=0.2),
    "some ignored": lambda h, y: F.cross_entropy(h.flatten(0, -2), torch.where(y % 3 == 0, -100, y).flatten()),
    "normalizer": lambda h, y: h.logsumexp(-1).square().mean(),
    "chosen": lambda h, y: -h.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "squares": lambda h, y: F.mse_loss(h, torch.full_like(h, 0.2)),
    "binary": lambda h, y: F.binary_cross_entropy_with_logits(h, (h > 0).to(h.dtype)),
    "mean": lambda h, y: h.tanh().mean(),
}


class Random(nn.Module):
    def __init__(self, pieces: list[str], loss: str, narrow: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDE, bias=len(pieces) % 2 == 0)
        self.down = nn.Linear(WIDE, WIDTH)
        self.head = nn.Linear(WIDTH, WIDE, bias=False)
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(WIDE) + 0.5) for _ in pieces)
        self.pieces, self.loss, self.is_narrow = pieces, loss, narrow

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        for piece, weight in zip(self.pieces, self.weights, strict=True):
            wide = ON_WIDE[piece](wide, weight)
        if self.is_narrow:
            wide = self.head(x + self.down(wide))
        return LOSSES[self.loss](wide, y)


MODELS = st.builds(
    Random,
    st.lists(st.sampled_from([*ON_WIDE]), min_size=1, max_size=4),
    st.sampled_from([*LOSSES]),
    st.booleans(),
    st.just(()),
)
SHAPES = st.sampled_from([(12,), (7,), (3, 5), (2, 8), (1, 4)])


def _check(model: Random, shape: tuple[int, ...], tiles: int, by_class: bool, share: float, seed: int) -> bool:
    torch.manual_seed(seed)
    model = copy.deepcopy(model).double()
    for p in model.parameters():
        nn.init.normal_(p, 0.3, 0.5)
    batch: dict[str, Any] = {
        "x": torch.randn(*shape, WIDTH, dtype=torch.float64),
        "y": torch.randint(0, WIDE, shape),
    }
    expected = step(model, model, batch, seed=seed)
    torch._dynamo.reset()
    own = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(own, memory_budget=share, passes=tiled_passes(tiles, by_class))
    assert_close(step(compiled, own, batch, seed=seed), expected, 1e-11)
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**batch).backward()
    assert peak.bytes <= compiled.plan.budget
    return is_tiled(compiled)


def _property(examples: int) -> Callable[[], None]:
    tiled = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        model=MODELS,
        shape=SHAPES,
        tiles=st.sampled_from([2, 3, 16]),
        by_class=st.booleans(),
        share=st.sampled_from([0.0, 0.5, 1.0]),
        seed=st.integers(0, 1 << 20),
    )
    def run(model: Random, shape: tuple[int, ...], tiles: int, by_class: bool, share: float, seed: int) -> None:
        tiled.append(_check(model, shape, tiles, by_class, share, seed))

    def check() -> None:
        run()
        assert sum(tiled) >= len(tiled) / 3

    return check


@pytest.mark.long
def test_random_modules() -> None:
    _property(8)()


@pytest.mark.long
def test_many_random_modules() -> None:
    _property(80)()
