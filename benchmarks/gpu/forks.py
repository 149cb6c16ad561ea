"""Fork and join: seconds of a step with recomputation on a side stream, and with all of it on the main stream."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

import roundpipe_fx
from benchmarks.gpu.measurement import Measurement, Row, Sizes, allocated_and_reserved, first_seconds, median_seconds

PART = "fork and join"


class Blocks(nn.Module):
    """Blocks whose kernels do not fill a device: a few rows, many layers."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def measurements() -> list[Measurement]:
    """With each way to run stages, both forms in one process."""
    return [
        Measurement(f"{PART}, {stages} stages", functools.partial(_rows, stages)) for stages in ("inductor", "eager")
    ]


def _without_forks(passes: list[roundpipe_fx.Pass]) -> Sequence[roundpipe_fx.Pass]:
    return [item for item in passes if item.name != "overlap_recompute"]


def _rows(stages: str, sizes: Sizes, _: Sequence[Row]) -> Iterator[Row]:
    depth, rows = 6 * sizes.layers, 16 * sizes.rows
    x = torch.randn(rows, sizes.width // 2, device="cuda")
    for way, passes in (("with a side stream", None), ("one stream", _without_forks)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Blocks(sizes.width // 2, depth).cuda()
        compiled = roundpipe_fx.compile(
            model, stages=depth // 2, recompute="full", stage_compiler=stages, passes=passes
        )

        def step(compiled: roundpipe_fx.CompiledModule = compiled, model: nn.Module = model) -> None:
            model.zero_grad()
            compiled(x).backward()

        first_seconds(step)
        peak, _ = allocated_and_reserved(model, step)
        yield {
            "part": PART,
            "stages": stages,
            "way": way,
            "forks": compiled.plan.sources()["program.py"].count("streams.fork("),
            "ms": 1e3 * median_seconds(step, 4 * sizes.rounds),
            "peak bytes": peak,
        }
