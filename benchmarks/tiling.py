"""Tiled operations beside tiling by hand: lowest peak, time at the peer's peak, and what planning takes.

python -m benchmarks.tiling [case …] [--pairs N]

Language models with 32,768 words return only their loss. Peers in the same run have ``torch.utils.checkpoint`` around
each layer and the loss in tiles by hand, in the three ways of ``tiling_by_hand.py``; for the long sequence the MLP too.
For each peer its peak is our budget, at which both are timed. Our lowest peak is that of the least budget that can be
met; at the end of any step all gradients of parameters exist, so none is lower than these. Gradients are held against
eager PyTorch's: the largest norm of an error over the largest norm of a gradient.

A Llama of 8B parameters in bfloat16, on the meta device, is planned for one RTX 4090 while it stays on the CPU, with
ever longer sequences; figures are of the simulator.

Planning is the CPU seconds of ``lower`` within the peak of the first peer, which needs tiles, over those within the
least budget that can be met without them.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

import roundpipe_fx
from benchmarks.models import llama_8b
from benchmarks.side_by_side import checkpoint_blocks, console, fresh, paired, rates_of, report, seconds_of
from benchmarks.tiling_by_hand import WAYS, Head, tile_mlps
from roundpipe_fx.api import on_one_device

_VOCABULARY = 32_768
_WIDTH = 256
_HEADS = 4
_OFFLOADED_TOKENS = (8 * 1024, 16 * 1024, 24 * 1024, 32 * 1024)
_DEVICE = "RTX 4090"
_PLANNED = 2
"""So often each kind of budget is planned for, in turns."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how its users would tile it.

    Attributes:
        name: the case's.
        make: a Hugging Face model.
        make_batch: its inputs, with labels.
        blocks: modules under ``torch.utils.checkpoint``.
        hidden: what the head reads, of the model and a batch.
        head: of the model.
        shifted: whether the label of a row is that of the next token.
        tiles: of the loss.
        mlps: of the model, to be tiled by hand; none: they are not.
        mlp_tiles: of an MLP.
        ways: to tile the loss by hand.
    """

    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...]
    hidden: Callable[[Any, dict[str, Any]], torch.Tensor]
    head: Callable[[Any], Head]
    shifted: bool = False
    tiles: int = 16
    mlps: Callable[[Any], list[nn.Module]] = field(default=lambda model: [])
    mlp_tiles: int = 1
    ways: tuple[str, ...] = tuple(WAYS)


class LossOnly(nn.Module):
    """A model that returns nothing but its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


class TiledByHand(nn.Module):
    """The same loss with checkpoints around layers and tiles, as users write it."""

    def __init__(self, model: nn.Module, case: Case, way: str) -> None:
        super().__init__()
        self.model = checkpoint_blocks(model, case.blocks)
        self.case, self.way = case, way
        tile_mlps(case.mlps(model), case.mlp_tiles, way)

    def forward(self, **batch: Any) -> torch.Tensor:
        rows = self.case.hidden(self.model, batch).flatten(0, 1)
        labels = batch["labels"]
        if self.case.shifted:
            labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return WAYS[self.way](self.case.head(self.model), rows, labels.flatten(), self.case.tiles)


def cases(vocabulary: int = _VOCABULARY, layers: int = 8, length: int = 256, long: int = 16_384) -> list[Case]:
    """The models."""
    shape = {"vocab_size": vocabulary, "hidden_size": _WIDTH, "num_attention_heads": _HEADS}

    def llama(layers: int) -> nn.Module:
        config = transformers.LlamaConfig(
            **shape,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_key_value_heads=_HEADS,
            max_position_embeddings=max(length, long),
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.LlamaForCausalLM(config)

    def gemma2() -> nn.Module:
        config = transformers.Gemma2Config(
            **shape,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_key_value_heads=_HEADS,
            head_dim=_WIDTH // _HEADS,
            query_pre_attn_scalar=_WIDTH // _HEADS,
            use_cache=False,
        )
        return transformers.Gemma2ForCausalLM(config)

    def t5() -> nn.Module:
        config = transformers.T5Config(
            vocab_size=vocabulary,
            num_layers=layers * 3 // 4,
            d_model=_WIDTH,
            d_ff=4 * _WIDTH,
            d_kv=_WIDTH // _HEADS,
            num_heads=_HEADS,
            use_cache=False,
            decoder_start_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)

    def bert() -> nn.Module:
        config = transformers.BertConfig(**shape, num_hidden_layers=layers, intermediate_size=4 * _WIDTH)
        return transformers.BertForMaskedLM(config)

    def tokens(batch: int, length: int, predicted: float = 1.0) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            generator = torch.Generator().manual_seed(0)
            words = torch.randint(vocabulary, (batch, length), generator=generator)
            counted = torch.rand(words.shape, generator=generator) < predicted
            return {"input_ids": words, "labels": torch.where(counted, words, -100)}

        return make

    def decoder_hidden(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return model.model(input_ids=batch["input_ids"]).last_hidden_state

    def t5_hidden(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        encoded = model.encoder(input_ids=batch["input_ids"]).last_hidden_state
        decoder_ids = model.prepare_decoder_input_ids_from_labels(batch["labels"])
        decoded = model.decoder(input_ids=decoder_ids, encoder_hidden_states=encoded).last_hidden_state
        return decoded * model.model_dim**-0.5

    def bert_hidden(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return model.bert(batch["input_ids"]).last_hidden_state

    def capped(model: Any) -> Head:
        return Head(model.lm_head, cap=model.config.final_logit_softcapping)

    def predictions(model: Any) -> Head:
        return Head(model.cls.predictions.decoder, before=model.cls.predictions.transform)

    decoder = tuple(f"model.layers.{i}" for i in range(layers))
    few = max(1, layers // 4)
    return [
        Case(
            name="Llama",
            make=lambda: llama(layers),
            make_batch=tokens(8, length),
            blocks=decoder,
            hidden=decoder_hidden,
            head=lambda model: Head(model.lm_head),
            shifted=True,
        ),
        Case(
            name="Gemma-2",
            make=gemma2,
            make_batch=tokens(8, length),
            blocks=decoder,
            hidden=decoder_hidden,
            head=capped,
            shifted=True,
        ),
        Case(
            name="T5",
            make=t5,
            make_batch=tokens(8, length),
            blocks=tuple(f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(layers * 3 // 4)),
            hidden=t5_hidden,
            head=lambda model: Head(model.lm_head),
        ),
        Case(
            name="BERT",
            make=bert,
            make_batch=tokens(8, length, predicted=0.15),
            blocks=tuple(f"bert.encoder.layer.{i}" for i in range(layers)),
            hidden=bert_hidden,
            head=predictions,
        ),
        Case(
            name="long Llama",
            make=lambda: llama(few),
            make_batch=tokens(1, long),
            blocks=tuple(f"model.layers.{i}" for i in range(few)),
            hidden=decoder_hidden,
            head=lambda model: Head(model.lm_head),
            shifted=True,
            mlps=lambda model: [layer.mlp for layer in model.model.layers],
            mlp_tiles=-(-long // _WIDTH),  # as Arctic's documentation has it
            ways=("checkpoint", "Arctic"),
        ),
    ]


@dataclass(frozen=True)
class Measured:
    """One way to run a training step."""

    peak: int
    step: Callable[[], torch.Tensor]
    gradients: dict[str, torch.Tensor]


def build(case: Case) -> nn.Module:
    """The case's model, always with the same weights, in training mode."""
    torch.manual_seed(0)
    return case.make().train()


def measure(run: Callable[..., Any], model: nn.Module, batch: dict[str, Any]) -> Measured:
    """Peak and gradients of a step that begins without gradients."""

    def step() -> torch.Tensor:
        model.zero_grad()
        torch.manual_seed(0)
        out = run(**batch)  # held through the backward, as training loops hold it
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        return loss.detach()

    step()
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        step()
    names = {id(value): name.removeprefix("model.") for name, value in model.named_parameters()}
    gradients = {names[id(value)]: value.grad for value in model.parameters() if value.grad is not None}
    model.zero_grad()
    return Measured(peak.bytes, step, gradients)


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest norm of an error over the largest norm of a gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(value.norm()) for value in expected.values())
    return max(float((found[name] - value).norm()) for name, value in expected.items()) / largest


def least_budget(model: nn.Module, batch: dict[str, Any], tiling: str | None = None) -> int:
    """The least bytes that a step needs, as the refusal of a budget that is too small names it."""
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=1, tiling=tiling, fullgraph=True)
    try:
        compiled.trace(**batch)
    except roundpipe_fx.InfeasibleBudgetError as error:
        console.print(error)
        return error.minimum
    raise AssertionError("a step within a byte")


def ours_at(model: nn.Module, batch: dict[str, Any], budget: int) -> tuple[Measured, Any]:
    """Our step within a budget, and its plan."""
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget, fullgraph=True)
    measured = measure(compiled, model, batch)
    return measured, compiled.plan


def planning_seconds(model: nn.Module, batch: dict[str, Any], budget: int) -> float:
    """CPU seconds of lowering for a budget."""
    spent = 0.0
    lower = on_one_device.lower

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        start = time.process_time()
        try:
            return lower(*args, **kwargs)
        finally:
            spent += time.process_time() - start

    torch._dynamo.reset()
    gc.collect()
    on_one_device.lower = timed
    try:
        roundpipe_fx.compile(model, memory_budget=budget, fullgraph=True).trace(**batch)
    finally:
        on_one_device.lower = lower
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("cases", nargs="*", help="names of cases; none: all")
    parser.add_argument("--pairs", type=int, default=5, help="paired steps a comparison; 0: no timing")
    arguments = parser.parse_args()
    os.environ["ROUNDPIPE_FX_PLAN_CACHE"] = "0"
    chosen = [case for case in cases() if not arguments.cases or case.name in arguments.cases]
    lowest_rows: list[dict[str, Any]] = []
    peer_rows: list[dict[str, Any]] = []
    planning_rows: list[dict[str, Any]] = []
    for case in fresh(chosen):
        lowest, beside, planning = rows_of(case, arguments.pairs)
        lowest_rows.append(lowest)
        peer_rows += beside
        planning_rows.append(planning)
        report("tiling_lowest", "the lowest peak with tiles", lowest_rows)
        report(
            "tiling",
            "compared with checkpoints per layer and hand-written tiles: lowest peak, time at the peer's peak",
            peer_rows,
        )
        report("tiling_planning", "CPU seconds of planning (target: ratio at most 1.3)", planning_rows)
    report("tiling_summary", "targets", summary(lowest_rows, peer_rows, planning_rows))
    if not arguments.cases:
        rows = [offloaded(tokens) for tokens in fresh(_OFFLOADED_TOKENS)]
        title = f"Llama of 8B parameters on the CPU, trained on one {_DEVICE} (target: 24 K)"
        report("tiling_offloaded", title, rows, rates_of(_DEVICE))


def rows_of(case: Case, pairs: int) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """What is found of a case: our lowest peak, each peer beside us, and planning."""
    batch = case.make_batch()
    model = LossOnly(build(case))
    eager = measure(model, model, batch)
    whole = least_budget(model, batch, tiling="never")
    least = least_budget(model, batch)
    ours, plan = ours_at(model, batch, least)
    returning = build(case)
    logits = least_budget(returning, batch)
    logits_ours, _ = ours_at(returning, batch, logits)
    lowest = {
        "model": case.name,
        "gradients MB": sum(value.nbytes for value in eager.gradients.values()) / 1e6,
        "eager MB": eager.peak / 1e6,
        "without tiles MB": whole / 1e6,
        "budget MB": least / 1e6,
        "predicted MB": plan.peak_bytes / 1e6,
        "measured MB": ours.peak / 1e6,
        "measured / predicted": ours.peak / plan.peak_bytes,
        "gradient error": f"{error_of(ours.gradients, eager.gradients):.1e}",
        "returning logits, budget MB": logits / 1e6,
        "measured MB with logits": logits_ours.peak / 1e6,
    }
    beside = []
    for way in case.ways:
        peer_model = TiledByHand(build(case), case, way)
        peer = measure(peer_model, peer_model, batch)
        beside.append(
            {
                "model": case.name,
                "tiles by hand": way,
                "its MB": peer.peak / 1e6,
                "its gradient error": f"{error_of(peer.gradients, eager.gradients):.1e}",
                "ours / its": ours.peak / peer.peak,
            }
            | at_its_peak(model, batch, peer, eager, pairs)
        )
    within = min(round(row["its MB"] * 1e6) for row in beside)
    spent = [
        [planning_seconds(model, batch, budget) for budget in (whole, max(within, least))] for _ in range(_PLANNED)
    ]
    without, with_tiles = (min(seconds) for seconds in zip(*spent, strict=True))
    planning = {
        "model": case.name,
        "without tiles s": without,
        "with tiles s": with_tiles,
        "ratio": with_tiles / without,
    }
    return lowest, beside, planning


def offloaded(tokens: int) -> dict[str, Any]:
    """What a step of one sequence is planned to need."""
    model = llama_8b()
    batch = torch.empty(1, tokens, dtype=torch.long, device="meta")
    start = time.process_time()
    plan = roundpipe_fx.plan(
        model, input_ids=batch, labels=batch, device=_DEVICE, offloaded=True, num_microbatches=1, host_budget="512GiB"
    )
    assert plan.pipeline is not None and plan.budget is not None
    return {
        "tokens": tokens,
        "budget GiB": plan.budget / 2**30,
        "peak GiB": max(plan.pipeline.peak_bytes) / 2**30,
        "regions in tiles": len(plan.tiles),
        "most tiles": max((region.tiles for region in plan.tiles), default=1),
        "modelled s": plan.pipeline.makespan,
        "CPU s to plan": time.process_time() - start,
    }


def at_its_peak(model: nn.Module, batch: dict[str, Any], peer: Measured, eager: Measured, pairs: int) -> dict[str, Any]:
    """Our step within a peer's peak, beside the peer's step."""
    try:
        ours, plan = ours_at(model, batch, peer.peak)
    except roundpipe_fx.InfeasibleBudgetError:
        return dict.fromkeys(("ours MB", "measured / predicted", "gradient error", "its s", "ours s", "time ratio"))
    found = {
        "ours MB": ours.peak / 1e6,
        "measured / predicted": ours.peak / plan.peak_bytes,
        "gradient error": f"{error_of(ours.gradients, eager.gradients):.1e}",
        "its s": None,
        "ours s": None,
        "time ratio": None,
    }
    if pairs:
        rounds = paired({"its": lambda: seconds_of(peer.step), "ours": lambda: seconds_of(ours.step)}, pairs, warm_up=1)
        found |= {f"{name} s": statistics.median(took[name] for took in rounds) for name in ("its", "ours")}
        found["time ratio"] = statistics.median(took["ours"] / took["its"] for took in rounds)
    return found


def summary(
    lowest_rows: list[dict[str, Any]], peer_rows: list[dict[str, Any]], planning_rows: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Each target and what was found, case by case, beside the leanest or slowest that decides it."""
    models = [row["model"] for row in lowest_rows]

    def each(rows: list[dict[str, Any]], column: str, pick: Callable[..., Any] = max) -> str:
        by_model = {model: [row[column] for row in rows if row["model"] == model] for model in models}
        return ", ".join(
            f"{model} {'cannot' if None in values else f'{pick(values):.2f}'}" for model, values in by_model.items()
        )

    plans = [*lowest_rows, *(row for row in peer_rows if row["ours MB"] is not None)]
    shares = [row["measured / predicted"] for row in plans]
    over = [row["model"] for row in lowest_rows if row["measured MB"] > row["budget MB"]]
    over += [row["model"] for row in peer_rows if row["ours MB"] is not None and row["ours MB"] > row["its MB"]]
    errors = [float(row["gradient error"]) for row in plans]
    return [
        {"target": "lowest peak / lowest of tiles by hand: at most 0.8", "found": each(peer_rows, "ours / its")},
        {"target": "step time at its peak: at most 0.9, long sequence 1.0", "found": each(peer_rows, "time ratio")},
        {"target": "measured / predicted peak: 0.97 to 1", "found": f"{min(shares):.3f} to {max(shares):.3f}"},
        {"target": "measured peak within the budget", "found": f"broken by {over}"},
        {"target": "gradient error at most 1e-6", "found": f"at most {max(errors):.1e}"},
        {"target": "planning with tiles / without: at most 1.3", "found": each(planning_rows, "ratio")},
    ]


if __name__ == "__main__":
    main()
