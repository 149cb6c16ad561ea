from __future__ import annotations

import itertools
import json

import pytest

import roundpipe_fx
from tests.pipeline.steps import CPUS, Blocks, batch_of, squares


def test_predicted_and_measured(tmp_path) -> None:
    x, y = batch_of(8)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4, checkpoint="always")
    compiled.trace(x, labels=y, loss_fn=squares)
    assert not compiled.plan.timeline().measured
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert len(compiled.plans) == 1, "traced for this"
    timeline = compiled.plan.timeline()
    key = lambda bar: (bar.device, str(bar.action))  # noqa: E731
    assert sorted(map(key, timeline.predicted)) == sorted(map(key, timeline.measured))
    for bars in (timeline.predicted, timeline.measured):
        for device in range(2):
            own = [bar for bar in bars if bar.device == device]
            assert all(0 <= bar.start <= bar.end for bar in own)
            assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(own))
            if bars is timeline.predicted:
                assert compiled.plan.pipeline is not None
                assert 0 < max(bar.bytes for bar in own) <= compiled.plan.pipeline.peak_bytes[device]
    ends = {(bar.action.step, bar.action.microbatch): bar for bar in timeline.measured}
    for bar in timeline.measured:
        assert compiled.plan.timing is not None
        for source in compiled.plan.timing.graph.reads[bar.action.step]:
            assert ends[source, bar.action.microbatch].end <= bar.start
    trace = json.loads(timeline.write(tmp_path / "trace.json").read_text())
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == len(timeline.predicted) + len(timeline.measured)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"} == {
        "predicted",
        "measured",
        "device 0",
        "device 1",
    }
    picture = timeline.plot(tmp_path / "timeline.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_step_through_autograd_is_one_timeline() -> None:
    x, y = batch_of(8)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4)
    squares(compiled(x), y).backward()
    bars = [bar for bar in compiled.plan.timeline().measured if bar.device == 0]
    assert [str(bar.action)[0] for bar in bars] == ["F"] * 4 + ["B"] * 4
    assert all(a.end <= b.start for a, b in itertools.pairwise(bars))


def test_what_has_a_timeline() -> None:
    x, y = batch_of(8)
    plan = roundpipe_fx.compile(Blocks()).trace(x)
    with pytest.raises(RuntimeError, match="no timeline"):
        plan.timeline()
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS)
    compiled.forward_backward(x, labels=y, loss_fn=squares)
    read = roundpipe_fx.Plan.from_json(compiled.plan.to_json())
    assert read == compiled.plan and read.pipeline == compiled.plan.pipeline
    assert read.timeline() == compiled.plan.timeline() and read.timeline().measured


def test_the_plan_prints_what_is_pipelined() -> None:
    x, y = batch_of(8)
    compiled = roundpipe_fx.compile(Blocks(), devices=CPUS, num_microbatches=4, checkpoint="except_last")
    plan = compiled.trace(x, labels=y, loss_fn=squares)
    text = str(plan)
    assert "pipelined: 4 microbatches by schedule '1f1b' on 2 devices, checkpoint='except_last'" in text
    assert "bubble" in text and "predicted peaks of the devices" in text
    assert plan.pipeline is not None
    assert plan.pipeline.order.splitlines()[1].startswith("1: V:F0.0<0 F1.0")
