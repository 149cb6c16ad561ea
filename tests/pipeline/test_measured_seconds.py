"""Measured seconds of stages correct modelled ones."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.pipeline.measured_seconds import measured_seconds, replace_by_measured
from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import Action, ActionKind, StepCosts

FORWARD, BACKWARD = (ActionKind.FORWARD, 0), (ActionKind.BACKWARD, 0)


def _spans(**seconds: list[float]) -> list[list[Span]]:
    """Spans of one device's stage, by kind and microbatch."""
    kinds = {"forward": ActionKind.FORWARD, "backward": ActionKind.BACKWARD}
    return [
        [
            Span(Action(kinds[name], 0, batch), 10.0, 11.0, 11.0 + taken)
            for name, taken_by_batch in seconds.items()
            for batch, taken in enumerate(taken_by_batch)
        ]
    ]


def test_the_median_counts() -> None:
    spans = _spans(forward=[9.0, 1.0, 1.5], backward=[4.0])  # the first microbatch loads kernels
    assert measured_seconds(spans) == pytest.approx({FORWARD: 1.5, BACKWARD: 4.0})
    other = (ActionKind.FORWARD, 1)
    costs = replace_by_measured(StepCosts(seconds={FORWARD: 1.0, other: 2.0}), spans)
    assert costs.seconds == pytest.approx({FORWARD: 1.5, BACKWARD: 4.0, other: 2.0})


def _compiled() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    return roundpipe_fx.compile(model, num_microbatches=3, schedule="gpipe", dynamic=False)


def _step(model: Any, rows: int, width: int = 64) -> Any:
    model(torch.ones(rows, width)).sum().backward()
    return model.plan


def test_the_makespan_has_the_seconds_of_the_latest_step() -> None:
    model = _compiled()
    plan = _step(model, 6)
    bars = plan.timeline().measured
    taken: dict[Any, list[float]] = {}
    for bar in bars:
        taken.setdefault(bar.action.step, []).append(bar.end - bar.start)
    expected = sum(3 * statistics.median(seconds) for seconds in taken.values())
    assert plan.corrected_makespan() == pytest.approx(expected)
    assert "in the latest step" not in str(plan)  # workers on the CPU share its cores
    assert roundpipe_fx.Plan.from_json(plan.to_json()).corrected_makespan() is None
