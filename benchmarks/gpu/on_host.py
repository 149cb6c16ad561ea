"""A model on the host, as ``nn.Sequential``: ours beside RoundPipe 0.1.1, where that is installed.

Tokens a second and the device's peak, of forward and backward, and with AdamW on float32 copies of the parameters,
synchronous (the next step reads the new parameters) and stale (it reads those of one step before). Ours run without a
budget, and within the peak of RoundPipe's step. RoundPipe divides its sequential model into layers, and takes no other
model here: its presets do not fit transformers 5.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

import roundpipe_fx
from benchmarks.gpu.by_stage import rows_by_stage
from benchmarks.gpu.measurement import (
    FIRST_STEP,
    Measurement,
    Row,
    Sizes,
    allocated_and_reserved,
    first_seconds,
    mebibytes,
    median_seconds,
)

PART = "on the host"
WORDS = 151_936
_STEPS = 3
"""Steps before those that are measured: RoundPipe times its layers in them, and ours compile."""
_MICROBATCHES = 4

OPTIMIZERS = ("none", "synchronous", "stale")
"""Optimizer steps after the backward: none, one that the next step waits for, one that it does not."""


class Layer(nn.Module):
    """A Qwen3 decoder layer that takes and returns hidden values alone, as an item of ``nn.Sequential`` must."""

    def __init__(self, config: transformers.Qwen3Config, index: int) -> None:
        super().__init__()
        self.layer = Qwen3DecoderLayer(config, index)
        self.rotary = Qwen3RotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        output = self.layer(hidden, position_embeddings=self.rotary(hidden, positions), position_ids=positions)
        return output if isinstance(output, torch.Tensor) else output[0]


def make(sizes: Sizes) -> nn.Sequential:
    """A model of Qwen3-1.7B's shape, head and embedding apart, in bfloat16 on the host."""
    heads = max(2, sizes.width // 128)
    config = transformers.Qwen3Config(
        hidden_size=sizes.width,
        intermediate_size=3 * sizes.width,
        num_hidden_layers=sizes.host_layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=min(128, sizes.width // heads),
        vocab_size=words(sizes),
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(words(sizes), sizes.width),
        *(Layer(config, index) for index in range(sizes.host_layers)),
        nn.RMSNorm(sizes.width, eps=1e-6),
        nn.Linear(sizes.width, words(sizes), bias=False),
    ).bfloat16()


def words(sizes: Sizes) -> int:
    """Number of words of the model's vocabulary."""
    return WORDS if sizes.width >= 1024 else 4 * sizes.width


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next tokens of a microbatch."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


def batch(sizes: Sizes, rows: int | None = None, length: int | None = None) -> torch.Tensor:
    """Random tokens on the host."""
    return torch.randint(words(sizes), (rows or 2 * sizes.rows, length or sizes.length))


def without_optimizer() -> list[Measurement]:
    """RoundPipe's and ours, of forward and backward."""
    return [
        Measurement("on the host, RoundPipe, none", functools.partial(_roundpipe, "none")),
        Measurement("on the host, ours, none", functools.partial(_ours, None, "none")),
    ]


def with_optimizer() -> list[Measurement]:
    """The same, with an optimizer's step."""
    return [
        Measurement(f"on the host, {name}, {kind}", run)
        for kind in OPTIMIZERS[1:]
        for name, run in (
            ("RoundPipe", functools.partial(_roundpipe, kind)),
            ("ours", functools.partial(_ours, None, kind)),
        )
    ]


def at_the_peaks_of_roundpipe() -> list[Measurement]:
    """Ours within the peak of RoundPipe's step, which was measured before."""
    return [
        Measurement(f"on the host, ours at RoundPipe's peak, {kind}", functools.partial(_ours_at_its_peak, kind))
        for kind in OPTIMIZERS
    ]


def _roundpipe(optimizer: str, sizes: Sizes, _: Sequence[Row]) -> Iterator[Row]:
    row = {"part": PART, "way": "RoundPipe", "optimizer": optimizer}
    if importlib.util.find_spec("roundpipe") is None:
        yield {**row, **_figures("RoundPipe is not installed")}
        return
    import roundpipe

    tokens = batch(sizes)
    model: Any = roundpipe.RoundPipe(
        make(sizes),
        optim_dtype=torch.float32,
        name="model",
        model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=_MICROBATCHES),
    )
    update = None
    if optimizer != "none":
        adamw = _adamw(model.optim_parameters())

        def step_fn() -> None:
            adamw.step()
            adamw.zero_grad()

        def update() -> None:
            model.step(step_fn, is_async=optimizer == "stale")

    def step() -> None:
        loss = model.forward_backward((tokens,), label=tokens, loss_fn=lambda x, y: loss_fn(x, y) / _MICROBATCHES)
        assert isinstance(loss, torch.Tensor)
        if update is None:
            model.synchronize()
            model.model.zero_grad()
        else:
            update()

    yield {**row, **_measured(model.model, step, tokens, sizes)}


def _ours_at_its_peak(optimizer: str, sizes: Sizes, rows: Sequence[Row]) -> Iterator[Row]:
    peaks = [row["peak MiB"] for row in rows if row.get("way") == "RoundPipe" and row["optimizer"] == optimizer]
    if not peaks or peaks[-1] is None:
        row = {"part": PART, "way": "ours at RoundPipe's peak", "optimizer": optimizer}
        yield {**row, **_figures("RoundPipe's peak is not known")}
        return
    yield from _ours(int(peaks[-1] * 2**20), optimizer, sizes, rows)


def _ours(budget: int | None, optimizer: str, sizes: Sizes, _: Sequence[Row]) -> Iterator[Row]:
    way = "ours" if budget is None else "ours at RoundPipe's peak"
    row = {"part": PART, "way": way, "optimizer": optimizer}
    model, tokens = make(sizes), batch(sizes)
    compiled: Any = roundpipe_fx.compile(
        model,
        devices=["cuda:0"],
        num_microbatches=_MICROBATCHES,
        memory_budget=budget,
        optim_dtype=None if optimizer == "none" else torch.float32,
    )
    step = _our_step(compiled, tokens, optimizer)
    try:
        measured = _measured(model, step, tokens, sizes)
    except roundpipe_fx.InfeasibleBudgetError as error:
        yield {**row, **_figures(f"refused: the least is {mebibytes(error.minimum):,.1f} MiB")}
        return
    compiled.synchronize()
    plan = compiled.plan
    planned = {"planned MiB": mebibytes(plan.peak_bytes), "modelled ms": 1e3 * plan.pipeline.makespan}
    yield {**row, **measured, **planned, "rates": plan.rates}
    if optimizer == "none":
        yield from rows_by_stage(f"{way}, on the host", plan)


def _our_step(compiled: Any, tokens: torch.Tensor, optimizer: str) -> Callable[[], None]:
    def backward(**options: Any) -> None:
        compiled.forward_backward(tokens, labels=tokens, loss_fn=loss_fn, **options)

    if optimizer == "none":

        def step() -> None:
            compiled.zero_grad()
            backward()

        return step
    adamw = _adamw(compiled.optim_parameters())
    if optimizer == "synchronous":
        return lambda: backward(optimizer=adamw)

    def stale() -> None:
        backward()
        compiled.step(adamw, is_async=True)

    return stale


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """PyTorch's fused AdamW on the host, for both: RoundPipe's has to be built by a compiler first."""
    return torch.optim.AdamW(parameters, weight_decay=0.01, fused=True)


def _measured(model: nn.Module, step: Callable[[], None], tokens: torch.Tensor, sizes: Sizes) -> Row:
    first = first_seconds(step)
    for _ in range(_STEPS - 1):
        step()
    peak, _ = allocated_and_reserved(model, step)
    seconds = median_seconds(step, sizes.rounds)
    known = {"ms": seconds * 1e3, "tokens/s": round(tokens.numel() / seconds), "peak MiB": mebibytes(peak)}
    return _figures(**known, **{FIRST_STEP: first})


def _figures(note: str = "", **known: Any) -> Row:
    columns = ("ms", "modelled ms", "tokens/s", "peak MiB", "planned MiB", FIRST_STEP, "rates")
    return {**dict.fromkeys(columns), **known, "note": note}
