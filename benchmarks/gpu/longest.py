"""The longest step: one row of more and more tokens, of a model on the host, until a step is refused."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import roundpipe_fx
from benchmarks.gpu.measurement import Measurement, Row, Sizes, allocated_and_reserved, mebibytes, median_seconds
from benchmarks.gpu.on_host import batch, loss_fn, make

PART = "the longest step"


def measurements(sizes: Sizes) -> list[Measurement]:
    """A measurement a length, which is run once."""
    return [
        Measurement(f"the longest step, {length:,} tokens", functools.partial(_row, length), warmed=False)
        for length in sizes.longest
    ]


def _row(length: int, sizes: Sizes, _: Any) -> Iterator[Row]:
    model, tokens = make(sizes), batch(sizes, rows=1, length=length)
    compiled: Any = roundpipe_fx.compile(model, devices=["cuda:0"], num_microbatches=1, dynamic=False)
    row = {"part": PART, "tokens": length}

    def step() -> None:
        compiled.zero_grad()
        compiled.forward_backward(tokens, labels=tokens, loss_fn=loss_fn)

    try:
        plan = compiled.trace(tokens, labels=tokens, loss_fn=loss_fn)
    except (roundpipe_fx.InfeasibleBudgetError, roundpipe_fx.HostMemoryError) as error:
        columns = ("s", "modelled s", "rates", "tokens/s", "peak MiB", "planned MiB", "in tiles")
        yield {**row, **dict.fromkeys(columns), "note": f"refused: {str(error).splitlines()[0][:160]}"}
        return
    peak, _ = allocated_and_reserved(model, step)
    seconds = median_seconds(step, 1)
    yield {
        **row,
        "s": seconds,
        "modelled s": plan.pipeline.makespan,
        "rates": plan.rates,
        "tokens/s": round(length / seconds),
        "peak MiB": mebibytes(peak),
        "planned MiB": mebibytes(plan.peak_bytes),
        "in tiles": len(plan.tiles),
        "note": "",
    }
