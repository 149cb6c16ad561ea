"""Physical peak of a step over budgets, beside ``torch.compile``: the curve of pytorch#197838.

python -m benchmarks.budget_curve
python -m benchmarks.budget_curve --budgets 0.05 0.15

That report is of a decoder of 32 layers like Llama's on a GPU, on which smaller values of
``torch._functorch.config.activation_memory_budget`` need more memory. Here it is narrower, and runs on the CPU: each
measurement is a process with one thread, as in :mod:`benchmarks.inductor`. Budgets of the two mean different things:
theirs is a share of the bytes that are saved, ours of the way from the lowest peak to that of saving everything.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import transformers
from torch import nn

from benchmarks.inductor import FIGURES, cell, compiled_by_torch, compiled_by_us, measured, tokens
from benchmarks.resident import in_a_process
from benchmarks.side_by_side import RESULTS, Case, report

_BUDGETS = (0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.5, 1.0)
_LAYERS, _WIDTH, _INNER, _WORDS = 32, 128, 352, 1024
_WAYS = {"torch.compile": compiled_by_torch, "ours": compiled_by_us}


def _case() -> Case:
    def make() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=_WORDS,
            hidden_size=_WIDTH,
            intermediate_size=_INNER,
            num_hidden_layers=_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)

    names = tuple(f"model.layers.{layer}" for layer in range(_LAYERS))
    return Case("Llama", make, lambda: tokens(_WORDS, 4, 256), names, "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budgets", nargs="*", type=float, default=_BUDGETS)
    parser.add_argument("--one", nargs=2)
    asked = parser.parse_args()
    if asked.one:
        way, budget = asked.one
        print(json.dumps(measured(_case(), _WAYS[way](float(budget)))))
        return
    path = RESULTS / "budget_curve.json"
    rows: dict[float, dict[str, Any]] = {}
    if path.exists():
        rows = {row["budget"]: row for row in json.loads(path.read_text())["rows"]}
    for budget in asked.budgets:
        rows[budget] = {"budget": budget}
        for way in _WAYS:
            figures = in_a_process("budget_curve", "--one", way, str(budget))
            rows[budget][way] = figures if isinstance(figures, str) else cell(**figures)
            print(f"{budget}, {way}: {rows[budget][way]}", file=sys.stderr, flush=True)
        report("budget_curve", FIGURES, [rows[budget] for budget in sorted(rows)])


if __name__ == "__main__":
    main()
