"""Measurements: functions that yield rows, and what they share: sizes, clocks, counters of the allocator."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import roundpipe_fx

Row = dict[str, Any]
"""A line of a table, by its headings; ``part`` names the table."""

FIRST_STEP = "first step s"
"""The column of the seconds of a step that compiles."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is measured.

    Attributes:
        width: of the language models that are timed.
        layers: their number of layers.
        words: of their vocabularies, of the Llama and of the GPT-2.
        rows: of a batch.
        length: tokens of a row.
        host_layers: number of layers of the model on the host.
        rounds: timed steps.
        peer_backend: what ``torch.compile`` compiles with as a peer.
        longest: tokens of rows that are tried one after the other.
        budget_models: number of models whose budgets are measured.
        budget_width: width of these models.
    """

    width: int = 2048
    layers: int = 8
    words: tuple[int, int] = (128_256, 50_257)
    rows: int = 4
    length: int = 2048
    host_layers: int = 28
    rounds: int = 8
    peer_backend: str = "inductor"
    longest: tuple[int, ...] = (64 << 10, 128 << 10, 256 << 10, 512 << 10)
    budget_models: int = 10
    budget_width: int = 256


FULL = Sizes()
SMALL = Sizes(
    width=64,
    layers=2,
    words=(512, 384),
    rows=4,
    length=32,
    host_layers=2,
    rounds=1,
    peer_backend="aot_eager",
    longest=(64, 128),
    budget_models=1,
    budget_width=32,
)
"""For emulated devices, which know no Triton."""


@dataclass(frozen=True)
class Measurement:
    """Something that is measured in a process of its own.

    Attributes:
        name: unique.
        run: yields rows as they are known, from the sizes and the rows that earlier groups have yielded.
        timed: whether rows have seconds, so that nothing else may use the device meanwhile.
        warmed: whether a timed one is run before, with others, to fill the caches of compiled code.
    """

    name: str
    run: Callable[[Sizes, Sequence[Row]], Iterator[Row]]
    timed: bool = True
    warmed: bool = True


Step = Callable[[], Any]
"""Runs one training step, from no gradients."""


def median_seconds(step: Step, rounds: int) -> float:
    """Median seconds of a step, on an otherwise idle device."""
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def first_seconds(step: Step) -> float:
    """Seconds of a step that compiles."""
    return median_seconds(step, 1)


def allocated_and_reserved(model: nn.Module, step: Step) -> tuple[int, int]:
    """Bytes that a step allocates, and that the allocator reserves for it, at most and beyond those before it.

    Args:
        model: its gradients are dropped first.
        step: the step.
    """
    model.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with roundpipe_fx.measure_peak("cuda") as peak:
        step()
    return peak.bytes, torch.cuda.max_memory_reserved() - reserved


def mebibytes(size: int) -> float:
    """Bytes as MiB, exactly."""
    return size / 2**20
