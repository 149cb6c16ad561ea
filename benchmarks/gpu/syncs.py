"""Host synchronizations in the backward of a mixture of experts: those that the profiler sees, and their operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, supported_activities

import roundpipe_fx
from benchmarks.gpu.measurement import Measurement, Row, Sizes
from benchmarks.models import ExpertTransformer
from benchmarks.side_by_side import checkpoint_blocks

PART = "host synchronizations"
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of CUDA's runtime in which the host waits for the device."""
_LAYERS = 3


def measurements() -> list[Measurement]:
    """One measurement of all ways: they count, so other processes may use the device."""
    return [Measurement(PART, _rows, timed=False)]


def _rows(sizes: Sizes, _: Any) -> Iterator[Row]:
    blocks = tuple(f"blocks.{index}" for index in range(_LAYERS))
    ways: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
        "eager": lambda model: model,
        "checkpoint per layer": lambda model: checkpoint_blocks(model, blocks),
        "ours, eager stages": functools.partial(_ours, "eager"),
        "ours, inductor stages": functools.partial(_ours, "inductor"),
    }
    for way, compiled in ways.items():
        torch.manual_seed(0)
        model = ExpertTransformer(256, _LAYERS, min(sizes.width, 256)).cuda()
        tokens = torch.randint(256, (sizes.rows, sizes.length), device="cuda")
        yield {"part": PART, "way": way, **_counted(compiled(model), tokens)}


def _ours(stages: str, model: nn.Module) -> roundpipe_fx.CompiledModule:
    return roundpipe_fx.compile(model, stages=_LAYERS, recompute="full", stage_compiler=stages)


def _waits(run: Callable[[], Any]) -> int | None:
    """Waits of the host while a function runs, without those of the profiler itself; ``None``: it sees none here."""
    activities = supported_activities() & {ProfilerActivity.CPU, ProfilerActivity.CUDA}
    if ProfilerActivity.CUDA not in activities:
        return None
    counts = []
    for profiled in (lambda: None, run):
        torch.cuda.synchronize()
        with profile(activities=activities) as profiler:
            profiled()
        counts.append(sum(event.name in _WAITS for event in profiler.events()))
    return counts[1] - counts[0]


def _counted(run: Callable[..., Any], tokens: torch.Tensor) -> Row:
    for _ in range(3):
        run(input_ids=tokens, labels=tokens).loss.backward()
    loss = run(input_ids=tokens, labels=tokens).loss
    waits = _waits(loss.backward)
    loss = run(input_ids=tokens, labels=tokens).loss
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    operators = ", ".join(f"{count} {name.removeprefix('aten.')}" for name, count in syncs.by_operator.items())
    note = "" if waits is not None else "the profiler sees no calls of CUDA's runtime here"
    return {"waits in the backward": waits, "operators": operators or "none", "note": note}
