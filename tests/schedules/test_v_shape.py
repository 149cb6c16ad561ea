"""V-shaped schedules: bubbles and memory as published, and no worse than PyTorch's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import expecttest
import pytest

from roundpipe_fx.schedules import (
    ActionKind,
    Held,
    Schedule,
    StepCosts,
    Timing,
    chain,
    dualpipev,
    one_f_one_b,
    simulate_time,
    validate,
    zbv,
    zero_bubble,
)
from tests.schedules.test_pytorch_csv import theirs

_SECONDS = [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (1.0, 2.0, 1.0), (3.0, 2.0, 1.0)]
"""Of a stage's forward and of the two parts of its backward."""


def _timing(schedule: Schedule, stages: int, seconds: tuple[float, ...] = (1, 1, 1), split: bool = True) -> Timing:
    """Each forward holds one byte until all of its stage's backward is over."""
    graph = chain(stages, split=split)
    took = dict(zip("FIW", seconds, strict=True)) | {"B": seconds[1] + seconds[2]}
    last = ActionKind.BACKWARD_WEIGHT if split else ActionKind.BACKWARD
    held = tuple(Held(1, (ActionKind.FORWARD, stage), ((last, stage),)) for stage in range(stages))
    return simulate_time(
        schedule, graph, StepCosts(seconds={step: took[step[0].value] for step in graph.steps}, held=held)
    )


def test_text_of_small_schedules() -> None:
    expecttest.assert_expected_inline(
        f"{zbv(2, 4, 3)}\n\n{zbv(2, 6, 2)}\n\n{dualpipev(2, 4, 3)}",
        """\
0: F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2
1: F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 W2.1 I1.1 I2.2 I1.2 W1.1 W2.2 W1.2

0: F0.0 F0.1 F4.0 F5.0 I5.0 I4.0 W5.0 W4.0 F4.1 F5.1 I5.1 I4.1 W5.1 W4.1 I0.0 W0.0 I0.1 W0.1
1: F1.0 F2.0 F3.0 F1.1 F2.1 F3.1 I3.0 W3.0 I2.0 I1.0 W2.0 W1.0 I3.1 W3.1 I2.1 I1.1 W2.1 W1.1

0: F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 F3.2 I0.0 W0.0 I3.2 W3.2 I0.1 W0.1 I0.2 W0.2
1: F1.0 F2.0 F1.1 F2.1 F1.2 I2.0 W2.0 F2.2 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1 I2.2 I1.2 W2.2 W1.2""",
    )


@pytest.mark.parametrize("make", [zbv, dualpipev])
def test_any_number_of_devices_stages_and_microbatches(make: Callable[[int, int, int], Schedule]) -> None:
    for devices, more, microbatches in itertools.product((1, 2, 3, 4), (0, 1, 4, 9), (1, 2, 3, 5, 9)):
        schedule = make(devices, devices + more, microbatches)
        validate(schedule, chain(devices + more, split=True), microbatches, devices)
        assert schedule.devices == devices


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [-1, 0, 1, 7])
def test_zbv_waits_for_the_first_forwards_only(devices: int, more: int) -> None:
    """And holds what 1F1B does, whose stages are twice as large."""
    microbatches, stages = 2 * devices + more, 2 * devices
    timing = _timing(zbv(devices, stages, microbatches), stages)
    assert timing.makespan == 6 * microbatches + devices - 1
    whole = _timing(one_f_one_b(devices, devices, microbatches), devices, split=False)
    assert max(timing.peak_bytes) == 2 * max(whole.peak_bytes)


@pytest.mark.parametrize("seconds", _SECONDS)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 7), (4, 8), (8, 24)])
def test_zbv_is_shorter_than_zero_bubble_and_no_longer_than_theirs(
    devices: int, microbatches: int, seconds: tuple[float, ...], tmp_path: Path
) -> None:
    stages = 2 * devices
    ours = _timing(zbv(devices, stages, microbatches), stages, seconds)
    peer = _timing(theirs(tmp_path / "file.csv", "ZBVZeroBubble", devices, microbatches), stages, seconds)
    assert ours.makespan <= peer.makespan + 1e-9 and max(ours.peak_bytes) <= max(peer.peak_bytes)
    twice = tuple(2 * of_stage for of_stage in seconds)
    assert ours.makespan < _timing(zero_bubble(devices, devices, microbatches), devices, twice).makespan


@pytest.mark.parametrize("seconds", _SECONDS)
@pytest.mark.parametrize(("devices", "microbatches"), [(2, 4), (3, 7), (4, 8), (8, 24)])
def test_dualpipev_waits_as_published_and_no_longer_than_theirs(
    devices: int, microbatches: int, seconds: tuple[float, ...], tmp_path: Path
) -> None:
    """(p - 1)(F&B + B - 3W), nothing being overlapped, and 2p + 1 of a device's stages' microbatches."""
    stages, (forward, inputs, weights) = 2 * devices, seconds
    backward = inputs + weights
    ours = _timing(dualpipev(devices, stages, microbatches), stages, seconds)
    waits = ours.makespan - 2 * microbatches * (forward + backward)
    assert waits <= (devices - 1) * (forward + backward + backward - 3 * weights) + 1e-9
    assert max(ours.peak_bytes) == 2 * devices + 1
    peer = _timing(theirs(tmp_path / "file.csv", "DualPipeV", devices, microbatches), stages, seconds)
    assert ours.makespan == pytest.approx(peer.makespan) and ours.peak_bytes == peer.peak_bytes
