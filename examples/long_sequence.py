"""Run one step of a Llama on a long sequence, and print its loss, its peak memory and its seconds.

python examples/long_sequence.py --tokens 131072 [--budget 60GiB] [--host 256GiB] [--layers 16] [--width 2048]

The shape is that of Llama 3.2 1B, with random weights. Wide values are computed in tiles, and cheap ones are
recomputed. On a GPU, values that take long to recompute, such as attention's outputs, are offloaded to the host. The
model returns only its loss: the logits of a million rows would take 250 GiB.
"""

from __future__ import annotations

import argparse
import time

import torch
import transformers
from torch import nn

import roundpipe_fx


class LossOnly(nn.Module):
    """A language model that returns nothing but its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of all tokens but the first, each predicted from those before it."""
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def llama(layers: int, width: int, vocabulary: int) -> LossOnly:
    """A Llama with random weights; heads of 64 numbers, a quarter as many of keys and values."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 256, 1),
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LossOnly(transformers.LlamaForCausalLM(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--budget", help="bytes of the device for the step, such as 60GiB; else 90 %% of what is free")
    parser.add_argument("--host", help="bytes of the host for values, such as 256GiB; else 80 %% of what is available")
    asked = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = llama(asked.layers, asked.width, asked.vocabulary).to(torch.bfloat16 if on_gpu else torch.float32)
        tokens = torch.randint(asked.vocabulary, (1, asked.tokens))
    step = roundpipe_fx.compile(
        model, memory_budget=asked.budget, host_budget=asked.host, tiling="auto", stage_compiler="eager"
    )
    print(step.trace(tokens))
    before = 0
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    loss = step(tokens)
    loss.backward()
    value = loss.item()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else step.plan.peak_bytes
    measured = "peak" if on_gpu else "planned peak"
    print(
        f"loss {value:.4f}, {measured} {peak / 2**20:,.0f} MiB, {seconds:.1f} s, {asked.tokens / seconds:,.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
