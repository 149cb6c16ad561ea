"""Peak live bytes of ``recompute="full"`` beside eager and ``torch.utils.checkpoint`` at the same places.

python -m benchmarks.peak_memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import build, cases, checkpoint_blocks, fresh, report, step


def peak(run: Callable[..., Any], model: nn.Module, batch: dict[str, Any]) -> float:
    step(run, model, batch)
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as measured:
        step(run, model, batch)
    return measured.bytes / 1e6


def main() -> None:
    rows = []
    # Beside width 256 the mixture of experts at 128: hoisted routing weighs by token, the rest by width.
    narrow = [replace(case, name=f"{case.name}, width 128") for case in cases(width=128) if "MoE" in case.name]
    for case in fresh([*cases(width=256), *narrow]):
        batch = case.make_batch()
        model = build(case)
        eager = peak(model, model, batch)
        model = checkpoint_blocks(build(case), case.blocks)
        checkpointed = peak(model, model, batch)
        model = build(case)
        compiled = roundpipe_fx.compile(model, stages=[*case.blocks, case.tail], recompute="full", fullgraph=True)
        ours = peak(compiled, model, batch)
        rows.append(
            {
                "model": case.name,
                "eager MB": eager,
                "checkpoint per block MB": checkpointed,
                "recompute=full, same places MB": ours,
                "ratio": ours / checkpointed,
            }
        )
    report("peak_memory", "peak live bytes of a training step (target: ratio at most 1)", rows)


if __name__ == "__main__":
    main()
