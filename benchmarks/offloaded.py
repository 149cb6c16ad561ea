"""Models that are larger than their GPU: how long a step is whose weights, and whose activations, are on the host.

python -m benchmarks.offloaded [name of a case …]

Models on the meta device, planned for one RTX 4090 while they stay on the CPU. Figures are of the simulator; the rates
that it assumes are printed first, and stored. A step is held against its own operations run once, with nothing
recomputed and nothing waited for.

RoundPipe publishes tokens a second for one RTX 4090, of sequences of 2,048 tokens in float16 whose products sum in
float16, with an optimizer's step that is applied one step late. Only cases of such sequences stand beside them, in
float16 with such sums (``torch.backends.cuda.matmul.allow_fp16_accumulation``): forward and backward, without an
optimizer. A late step runs beside the next one; a synchronous one would come on top, and of it RoundPipe publishes
nothing. Long sequences, up to the longest that RoundPipe trains, have no published speed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

import roundpipe_fx
from benchmarks.models import llama_8b
from benchmarks.side_by_side import console, fresh, rates_of, report

_DEVICE = "RTX 4090"
_HOST = "512GiB"


def _qwen3(width: int, inner: int, layers: int, heads: int, tied: bool) -> nn.Module:
    """A Qwen3 on the meta device."""
    config = transformers.Qwen3Config(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.Qwen3ForCausalLM(config)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A model and its batch.

    Attributes:
        make: makes the model.
        microbatches: how many sequences, each a microbatch.
        tokens: of a sequence.
        published: tokens a second that RoundPipe publishes for such sequences; ``None``: it publishes none.
    """

    make: Callable[[], nn.Module]
    microbatches: int
    tokens: int
    published: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the model: RoundPipe's, where that is beside it."""
        return torch.bfloat16 if self.published is None else torch.float16


def qwen3_2b() -> nn.Module:
    """A Qwen3 of 1.7B parameters, on the meta device."""
    return _qwen3(2048, 6144, 28, 16, True)


def qwen3_32b() -> nn.Module:
    """A Qwen3 of 32B parameters, on the meta device."""
    return _qwen3(5120, 25600, 64, 64, False)


_CASES = {
    "Qwen3-1.7B, 16 × 2 K": _Case(make=qwen3_2b, microbatches=16, tokens=2048, published=8881),
    "Llama-3.1-8B, 16 × 2 K": _Case(make=llama_8b, microbatches=16, tokens=2048, published=3142),
    "Qwen3-32B, 16 × 2 K": _Case(make=qwen3_32b, microbatches=16, tokens=2048, published=740),
    "Llama-3.1-8B, 49 K": _Case(make=llama_8b, microbatches=1, tokens=49 * 1024),
    "Qwen3-1.7B, 73 K": _Case(make=qwen3_2b, microbatches=1, tokens=73 * 1024),
    "Qwen3-32B, 28 K": _Case(make=qwen3_32b, microbatches=1, tokens=28 * 1024),
}


def main() -> None:
    rates = rates_of(_DEVICE)
    console.print(rates)
    names = sys.argv[1:] or list(_CASES)
    rows = [_planned(name) for name in fresh(names)]
    report("offloaded", f"Models on the CPU, trained on one {_DEVICE}", rows, rates)


def _planned(name: str) -> dict[str, Any]:
    case = _CASES[name]
    model = case.make().to(case.dtype)
    tokens = torch.empty(case.microbatches, case.tokens, dtype=torch.long, device="meta")
    began, busy = time.perf_counter(), time.process_time()
    row: dict[str, Any] = {"case": name, "dtype": str(case.dtype).removeprefix("torch.")}
    try:
        torch.backends.cuda.matmul.allow_fp16_accumulation = case.published is not None
        plan = roundpipe_fx.plan(
            model,
            input_ids=tokens,
            labels=tokens,
            device=_DEVICE,
            offloaded=True,
            num_microbatches=case.microbatches,
            host_budget=_HOST,
        )
    except roundpipe_fx.InfeasibleBudgetError as error:
        row |= dict.fromkeys(("rates", "peak GiB", "host GiB", "sent GiB", "in tiles", "modelled s", "tokens/s"))
        row |= {"peak GiB": error.minimum / 2**30, "tokens/s": "does not fit"}
        row |= dict.fromkeys(("recomputing and waiting for nothing", "RoundPipe tokens/s"))
    else:
        pipeline = plan.pipeline
        assert pipeline is not None
        count = case.microbatches * case.tokens
        once = case.microbatches * sum(own.forward_seconds + own.backward_seconds for own in plan.stages)
        row |= {
            "rates": plan.rates,
            "peak GiB": max(pipeline.peak_bytes) / 2**30,
            "host GiB": plan.host_bytes / 2**30,
            "sent GiB": pipeline.sent_bytes / 2**30,
            "in tiles": len(plan.tiles),
            "modelled s": pipeline.makespan,
            "tokens/s": round(count / pipeline.makespan),
            "recomputing and waiting for nothing": round(count / once),
            "RoundPipe tokens/s": case.published or "",
        }
    console.print(row)
    return row | {"CPU s to plan": time.process_time() - busy, "s to plan": time.perf_counter() - began}


if __name__ == "__main__":
    main()
