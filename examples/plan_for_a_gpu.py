"""Plan for an absent GPU: by sequence length, the peak without recomputation, the lowest peak and its recomputation.

python examples/plan_for_a_gpu.py [--device "RTX 4090"] [--layers 16] [--width 1024]

Nothing is run, and no memory is allocated for the model. The command line does the same for any configuration from
Hugging Face: roundpipe-fx fit CONFIG --device "RTX 4090" --sequence 4096.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from rich.console import Console
from rich.table import Table

import roundpipe_fx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="RTX 4090")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    given = parser.parse_args()

    config = transformers.LlamaConfig(
        num_hidden_layers=given.layers,
        hidden_size=given.width,
        intermediate_size=4 * given.width,
        num_attention_heads=given.width // 64,
        use_cache=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    count = sum(parameter.numel() for parameter in model.parameters())
    table = Table("tokens", "nothing recomputed GiB", "lowest GiB", "recomputed there", title=f"{count:,} parameters")
    for length in given.lengths:
        tokens = torch.empty(1, length, dtype=torch.long)
        batch = {"input_ids": tokens, "labels": tokens, "device": given.device}
        most = roundpipe_fx.plan(model, memory_budget=1.0, **batch)
        least = roundpipe_fx.plan(model, memory_budget=0.0, **batch)
        share = least.recompute_seconds / least.forward_seconds
        sizes = [f"{plan.peak_bytes / 2**30:.2f}" for plan in (most, least)]
        table.add_row(f"{length:,}", *sizes, f"{share:.0%} of the forward")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
