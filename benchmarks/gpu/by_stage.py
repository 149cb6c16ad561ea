"""Modelled seconds beside measured ones, by stage, of steps that are pipelined on one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import roundpipe_fx
from benchmarks.gpu.measurement import Measurement, Row, Sizes
from benchmarks.gpu.peers import make

PART = "modelled and measured"
_STEPS = 4
_MICROBATCHES = 4


def measurements() -> list[Measurement]:
    """A Llama on the device, in microbatches; of models on the host, their own measurements yield such rows."""
    return [Measurement("modelled and measured, Llama", _on_the_device)]


def _on_the_device(sizes: Sizes, _: Sequence[Row]) -> Iterator[Row]:
    model, batch = make("Llama", sizes)
    compiled: Any = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=_MICROBATCHES, stages=sizes.layers)
    for _ in range(_STEPS):
        compiled.zero_grad()
        compiled.forward_backward(**batch)
    yield from rows_by_stage("Llama on the device", compiled.plan)


def rows_by_stage(model: str, plan: roundpipe_fx.Plan) -> Iterator[Row]:
    """A row for each stage and kind of action, with means over microbatches, and one for the whole step.

    Args:
        model: its name.
        plan: of its latest step.
    """
    timeline = plan.timeline()
    seconds: dict[tuple[int, str], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for which, bars in enumerate((timeline.predicted, timeline.measured)):
        for bar in bars:
            seconds[bar.action.stage, bar.action.kind.name.lower()][which].append(bar.end - bar.start)
    for (stage, kind), (modelled, measured) in sorted(seconds.items()):
        row = {"part": PART, "model": model, "rates": plan.rates, "stage": stage, "action": kind}
        yield {**row, **_compared(sum(modelled) / len(modelled), sum(measured) / len(measured))}
    ends = [max(bar.end for bar in bars) for bars in (timeline.predicted, timeline.measured)]
    row = {"part": PART, "model": model, "rates": plan.rates, "stage": "all", "action": "step"}
    yield {**row, **_compared(*ends)}


def _compared(modelled: float, measured: float) -> Row:
    return {"modelled ms": 1e3 * modelled, "measured ms": 1e3 * measured, "measured / modelled": measured / modelled}
