"""The longest sequences that one GPU trains, on paper: what a step takes beyond its own operations.

python -m benchmarks.longest [name of a case …]

Models in bfloat16 on the meta device that return only their loss, with one sequence, planned for a GPU that need not be
present and for a host with so much memory. A step, as modelled, is held against its own operations run once, attention
included, with nothing recomputed and nothing waited for: that is the bound for these operations. What binds is what the
plan has used up where it recomputes or waits: memory of the device, memory of the host, or the link between them. Of a
step that does not fit, the peak is the least that was found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks.models import llama_1b, llama_8b
from benchmarks.offloaded import qwen3_2b, qwen3_32b
from benchmarks.side_by_side import console, fresh, rates_of, report
from benchmarks.tiling import LossOnly
from roundpipe_fx.command_line.adapters import add_lora, parse_lora
from roundpipe_fx.command_line.quantized_base import quantize

_SMALL = "RTX 4090"
_ONCE = 1.02
"""Up to so many times its operations, a step is not said to be bound by memory or by the link."""
_COLUMNS = (
    *("case", "tokens", "device", "weights", "host has GiB", "modelled s", "operations once s", "ratio", "at most"),
    *("peak GiB", "host GiB", "in tiles", "binds", "CPU s to plan"),
)
_USED = 0.9
"""Share from which on memory of the host is used up."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A model, and where it is trained.

    Attributes:
        make: makes the model.
        tokens: of the one sequence.
        device: name of the GPU.
        host: its memory in GiB.
        offloaded: whether the weights stay on the host.
        most: the largest ratio of a step to its operations that is asked for; ``None``: to fit is.
    """

    make: Callable[[], nn.Module]
    tokens: int
    device: str
    host: int
    offloaded: bool = False
    most: float | None = None


def _qwen3_2b() -> nn.Module:
    return qwen3_2b().bfloat16()


def _qwen3_32b() -> nn.Module:
    return qwen3_32b().bfloat16()


def _llama_8b_with_adapters() -> nn.Module:
    """A Llama of 8B parameters, frozen in 4 bits each, with adapters in bfloat16."""
    model = llama_8b()
    quantize(model, "nf4")
    adapted = add_lora(model, parse_lora("r=16,targets=all-linear"))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    return adapted


_CASES = {
    "Llama-3.2-1B, 128 K": _Case(make=llama_1b, tokens=2**17, device="H100", host=128, most=1.25),
    "Llama-3.2-1B, 1 M": _Case(make=llama_1b, tokens=2**20, device="H100", host=256, most=1.25),
    "Llama-3.2-1B, 1 M, less host": _Case(make=llama_1b, tokens=2**20, device="H100", host=120, most=1.6),
    "Qwen3-1.7B, 512 K": _Case(make=_qwen3_2b, tokens=2**19, device="H100", host=256, most=1.25),
    "Llama-3.1-8B, 512 K": _Case(make=llama_8b, tokens=2**19, device="H100", host=512, offloaded=True, most=1.4),
    "Qwen3-1.7B, 73 K": _Case(make=_qwen3_2b, tokens=73 * 2**10, device="RTX 4090", host=128, offloaded=True, most=1.1),
    "Llama-3.1-8B, 49 K": _Case(
        make=llama_8b, tokens=49 * 2**10, device="RTX 4090", host=256, offloaded=True, most=1.1
    ),
    "Qwen3-32B, 28 K": _Case(make=_qwen3_32b, tokens=28 * 2**10, device="RTX 4090", host=512, offloaded=True, most=1.1),
    "Llama-3.1-8B, LoRA, NF4, 512 K": _Case(make=_llama_8b_with_adapters, tokens=2**19, device="RTX 4090", host=256),
}


def main() -> None:
    names = sys.argv[1:] or list(_CASES)
    rows = [_planned(name) for name in fresh(names)]
    rates = "; ".join(rates_of(device) for device in dict.fromkeys(_CASES[name].device for name in names))
    report("longest", "One sequence on one GPU", rows, rates)


def _planned(name: str) -> dict[str, Any]:
    case = _CASES[name]
    tokens = torch.empty(1, case.tokens, dtype=torch.long, device="meta")
    row: dict[str, Any] = {
        "case": name,
        "tokens": case.tokens,
        "device": case.device,
        "weights": "host" if case.offloaded else "device",
        "host has GiB": case.host,
    }
    busy = time.process_time()
    try:
        plan = roundpipe_fx.plan(
            LossOnly(case.make()),
            input_ids=tokens,
            labels=tokens,
            device=case.device,
            host_budget=f"{case.host}GiB",
            tiling="auto",
            offloaded=case.offloaded,
            num_microbatches=1 if case.offloaded else None,
        )
    except roundpipe_fx.InfeasibleBudgetError as error:
        row |= {"peak GiB": error.minimum / 2**30, "binds": "does not fit"}
    else:
        once = sum(own.forward_seconds + own.backward_seconds for own in plan.stages)
        pipeline = plan.pipeline
        recomputed = sum(own.recompute_seconds for own in plan.stages)
        step = once + recomputed if pipeline is None else pipeline.makespan
        row |= {
            "modelled s": step,
            "operations once s": once,
            "ratio": step / once,
            "peak GiB": (plan.peak_bytes if pipeline is None else max(pipeline.peak_bytes)) / 2**30,
            "host GiB": plan.host_bytes / 2**30,
            "in tiles": len(plan.tiles),
            "binds": _binding(plan, case, step / once),
        }
    row |= {"at most": "" if case.most is None else case.most, "CPU s to plan": time.process_time() - busy}
    console.print(row)
    return dict.fromkeys(_COLUMNS, "") | row


def _binding(plan: roundpipe_fx.Plan, case: _Case, ratio: float) -> str:
    """The resource without which the step would be shorter."""
    if ratio <= _ONCE:
        return "operations"
    if plan.is_bound_by_host_link:
        return "link"
    return "host's memory" if plan.host_bytes >= _USED * case.host * 2**30 else "device's memory"


if __name__ == "__main__":
    main()
