"""Gradient accumulation on one device: microbatches of one call beside a loop of backwards.

python -m benchmarks.accumulation [--pairs N]

The models of the frontier, a batch in 8 microbatches. Peers loop over them: eager, and with ``torch.utils.checkpoint``
per block. Asked is how low ``num_microbatches=8`` gets with a byte budget beside the lower of the two; and what a step
costs beside checkpoints when it is given their peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import build, checkpoint_blocks, fresh, heavy_cases, paired_ratio, report

MICROBATCHES = 8


def looped(model: nn.Module, batch: dict[str, Any]) -> Callable[[], None]:
    """A step of gradient accumulation as people write it."""
    parts = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}

    def run() -> None:
        model.zero_grad()
        for index in range(MICROBATCHES):
            model(**{name: own[index] for name, own in parts.items()}).loss.backward()

    return run


def within(model: nn.Module, batch: dict[str, Any], budget: int | float) -> Callable[[], None]:
    """The same in one call, within a budget."""
    compiled = roundpipe_fx.compile(model, num_microbatches=MICROBATCHES, memory_budget=budget)

    def run() -> None:
        model.zero_grad()
        compiled.forward_backward(**batch)

    return run


def peak(run: Callable[[], None], model: nn.Module) -> int:
    run()
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as measured:
        run()
    return measured.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=5, help="paired steps a comparison")
    pairs = parser.parse_args().pairs
    rows = []
    for case in fresh(heavy_cases()):
        batch = case.make_batch()
        model = build(case)
        eager = peak(looped(model, batch), model)
        placed = checkpoint_blocks(build(case), case.blocks)
        checkpoints = looped(placed, batch)
        checkpointed = peak(checkpoints, placed)
        model = build(case)
        lowest = peak(within(model, batch, 0.0), model)
        model = build(case)
        ours = within(model, batch, checkpointed)
        reached = peak(ours, model)
        assert reached <= checkpointed
        ratio, seconds, theirs = paired_ratio(ours, checkpoints, pairs)
        rows.append(
            {
                "model": case.name,
                "gradients MB": sum(p.numel() * p.element_size() for p in model.parameters()) / 1e6,
                "eager MB": eager / 1e6,
                "checkpoints MB": checkpointed / 1e6,
                "lowest MB": lowest / 1e6,
                "lowest / lower peer": lowest / min(eager, checkpointed),
                "at checkpoints' peak MB": reached / 1e6,
                "s": seconds,
                "checkpoints s": theirs,
                "s / checkpoints s": ratio,
            }
        )
    report("accumulation", f"gradient accumulation over {MICROBATCHES} microbatches on one device", rows)


if __name__ == "__main__":
    main()
