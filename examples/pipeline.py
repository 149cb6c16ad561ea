"""Train a Llama as a pipeline, with two workers, four microbatches and a memory budget for each worker.

python examples/pipeline.py                          two workers on the CPU, which share its cores
python examples/pipeline.py --devices cuda:0 cuda:1
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers

import roundpipe_fx


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--schedule", default="1f1b", help="gpipe, 1f1b, interleaved, zero_bubble, zbv, dualpipev, roundpipe, auto"
    )
    parser.add_argument(
        "--budget", type=float, default=0.5, help="a share of what a worker needs with nothing recomputed"
    )
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=4,
        vocab_size=512,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to(given.devices[0])
    model = roundpipe_fx.compile(
        model,
        devices=given.devices,
        num_microbatches=given.microbatches,
        schedule=given.schedule,
        memory_budget=given.budget,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(512, (2 * given.microbatches, 64), device=given.devices[0])
    for step in range(given.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model.forward_backward(input_ids=tokens, labels=tokens)
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}, {time.perf_counter() - began:.2f} s")
    print(model.plan)
    print("timeline:", model.plan.timeline().write("timeline.json"), "(open it at ui.perfetto.dev)")


if __name__ == "__main__":
    main()
