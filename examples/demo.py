"""Train a small Qwen3 mixture of experts on the CPU three ways, and compare.

The three are eager PyTorch, Hugging Face's own checkpointing (``torch.utils.checkpoint`` per layer), and roundpipe_fx,
with the same model, the same bytes of text and the same seeds. Every figure in the table is measured in this run.
"""

from __future__ import annotations

import argparse
import copy
import pydoc_data.topics
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import roundpipe_fx

warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
transformers.logging.set_verbosity_error()


@dataclass
class Figures:
    """What one way of training showed."""

    name: str
    peak: int
    host_syncs: int
    seconds: float
    difference: float
    losses: list[float]


def make_model(layers: int, width: int, experts: int) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        num_experts=experts,
        num_experts_per_tok=2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def make_batches(count: int, batch: int, length: int) -> list[torch.Tensor]:
    """Random pieces, as bytes, of the help texts that ship with Python."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - length, (count, batch), generator=generator)
    return [torch.stack([data[start : start + length] for start in row]) for row in starts]


def gradients(run: nn.Module, tokens: torch.Tensor) -> tuple[int, int, dict[str, torch.Tensor]]:
    """One step's peak of live bytes, host syncs in its backward, and gradients."""
    run.zero_grad()
    torch.manual_seed(0)
    with roundpipe_fx.measure_peak("cpu") as peak:
        run(input_ids=tokens, labels=tokens).loss.backward()
    run.zero_grad()
    torch.manual_seed(0)
    loss = run(input_ids=tokens, labels=tokens).loss
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    found = {name: p.grad.float().clone() for name, p in run.named_parameters() if p.grad is not None}
    run.zero_grad()
    return peak.bytes, syncs.total, found


def train(
    name: str, run: nn.Module, batches: list[torch.Tensor], reference: dict[str, torch.Tensor], tick: Callable[[], None]
) -> tuple[Figures, dict[str, torch.Tensor]]:
    run(input_ids=batches[0], labels=batches[0]).loss.backward()  # warm-up: compiles
    peak, host_syncs, found = gradients(run, batches[0])
    reference = reference or found
    difference = max(float((found[n] - g).abs().max() / g.abs().max().clamp_min(1e-12)) for n, g in reference.items())
    optimizer = torch.optim.AdamW(run.parameters(), lr=2e-3)
    losses, seconds = [], []
    for tokens in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
        tick()
    return Figures(name, peak, host_syncs, statistics.median(seconds), difference, losses), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", default="", help="folder to write the emitted stage modules to")
    options = parser.parse_args()
    console = Console(width=120)
    model = make_model(options.layers, options.width, options.experts)
    batches = make_batches(options.steps, options.batch, options.length)

    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed.train()
    # A stage for each half of a layer, and one for the head.
    halves = [f"model.layers.{i}{half}" for i in range(options.layers) for half in ("", ".post_attention_layernorm")]
    compiled = roundpipe_fx.compile(copy.deepcopy(model), stages=[*halves, "model.norm"], recompute="full")
    ways = {
        "eager": copy.deepcopy(model).train(),
        "torch.utils.checkpoint per layer": checkpointed,
        f"roundpipe_fx, {len(halves) + 2} stages": compiled,
    }
    rows: list[Figures] = []
    reference: dict[str, torch.Tensor] = {}
    with Progress(console=console) as progress:
        for name, run in ways.items():
            task = progress.add_task(name, total=len(batches))
            figures, found = train(name, run, batches, reference, lambda task=task: progress.advance(task))
            reference = reference or found
            rows.append(figures)

    table = Table(title=f"Qwen3-MoE, {options.layers} layers, bf16, {options.batch} x {options.length} bytes, CPU")
    for heading in ("", "peak live MB", "sync ops in backward", "s a step", "worst gradient difference", "loss"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.peak / 1e6:.1f}",
            str(row.host_syncs),
            f"{row.seconds:.2f}",
            f"{row.difference:.1e}",
            f"{row.losses[0]:.2f} to {statistics.mean(row.losses[-4:]):.2f}",
        )
    console.print(table)
    console.print(str(compiled.plan), markup=False, highlight=False)
    if options.out:
        files = compiled.plan.write(options.out)
        console.print(f"wrote {len(files)} files to {options.out}")


if __name__ == "__main__":
    main()
