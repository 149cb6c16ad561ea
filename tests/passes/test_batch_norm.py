from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import input_nodes
from roundpipe_fx.passes.batch_norm import release_running_statistics
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step
from tests.graph_text import after

aten = torch.ops.aten


class Normalized(nn.Module):
    def __init__(self, affine: bool = True, parameters: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 1, 1))
        self.norm = nn.BatchNorm2d(3, affine=affine, dtype=parameters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((x * self.weight).to(x.dtype)).sin().sum()


def gradient_of_norm(joint) -> torch.fx.Node:
    (node,) = (node for node in joint.computed() if node.target is aten.native_batch_norm_backward.default)
    return node


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("values", "parameters"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_bits_stay(affine: bool, values: torch.dtype, parameters: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(2, 3, 5, 4).to(values).to(memory_format=layout)
    joint = capture_joint(Normalized(affine, parameters), x)
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    before = len(input_nodes(gradient_of_norm(joint)))
    release_running_statistics(joint)
    assert len(input_nodes(gradient_of_norm(joint))) == before - 2
    for found, reference in zip(run_joint(joint, inputs), expected, strict=True):
        assert (found is None) == (reference is None)
        assert reference is None or torch.equal(found, reference)


def test_running_statistics_that_are_used_stay() -> None:
    joint = capture_joint(Normalized().eval(), torch.randn(2, 3, 5, 4))
    read = input_nodes(gradient_of_norm(joint))
    assert input_nodes(gradient_of_norm(release_running_statistics(joint))) == read


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def test_a_step_keeps_no_more_than_eager() -> None:
    model, x = Two(), torch.randn(2, 3, 9, 9)
    compiled = roundpipe_fx.compile(model, memory_budget=1.0)
    peaks = []
    for run in (model, compiled):
        run(x).backward()
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            run(x).backward()
        peaks.append(peak.bytes)
        model.zero_grad()
    assert peaks[0] == peaks[1] == compiled.plan.peak_bytes


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("values", [torch.float32, torch.bfloat16])
def test_a_batch_norm_that_is_made_again_reads_no_running_statistics(affine: bool, values: torch.dtype) -> None:
    model, batch = Normalized(affine), {"x": torch.randn(2, 3, 5, 4).to(values)}
    reference = aot_eager_step(model, batch)
    step, compiled = compiled_step(model, batch, stages=1, recompute="full")
    assert_bitwise(step, reference)
    text = "".join(compiled.plan.sources().values())
    # Without a weight the kernel computes in the type of the statistics, so they must be what they were.
    assert ("no_stats" in text) != ("before_update" in text)
    assert ("no_stats" in text) == (affine or values is torch.float32)


class Level(nn.Module):
    """What a batch norm has made of its running mean is read in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).sin()
        return self.last(x * self.norm.running_mean.exp()).square().sum()


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"memory_budget": 0.0}])
def test_new_statistics_that_the_forward_reads_are_made_again_from_what_they_were(options: dict[str, Any]) -> None:
    model, batch = Level(), {"x": torch.randn(6, 4)}
    step, _ = compiled_step(model, batch, **options)
    assert_bitwise(step, aot_eager_step(model, batch))


def test_as_text_in_training_none_are_read() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4, 4],
    weight: float32[3],
    mean: float32[3],
    variance: float32[3],
    tangents_1: float32[2, 3, 4, 4],
):
    # captured
    norm: (float32[2, 3, 4, 4], float32[3], float32[3]) = aten.native_batch_norm.default(x, weight, None, mean, variance, True, 0.1, 1e-05)
    getitem: float32[2, 3, 4, 4] = norm[0]
    getitem_1: float32[3] = norm[1]
    getitem_2: float32[3] = norm[2]
    back: (float32[2, 3, 4, 4], float32[3], float32[3]) = aten.native_batch_norm_backward.default(tangents_1, x, weight, mean, variance, getitem_1, getitem_2, True, 1e-05, [True, True, True])
    grad: float32[2, 3, 4, 4] = back[0]
    return (getitem,), (grad, None, None, None)
"""
    made = after(release_running_statistics, before, name="batch_norm")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 3, 4, 4],
    weight: float32[3],
    mean: float32[3],
    variance: float32[3],
    tangents_1: float32[2, 3, 4, 4],
):
    # captured
    norm: (float32[2, 3, 4, 4], float32[3], float32[3]) = aten.native_batch_norm.default(x, weight, None, mean, variance, True, 0.1, 1e-05)
    getitem: float32[2, 3, 4, 4] = norm[0]
    getitem_1: float32[3] = norm[1]
    getitem_2: float32[3] = norm[2]
    back: (float32[2, 3, 4, 4], float32[3], float32[3]) = aten.native_batch_norm_backward.default(tangents_1, x, weight, None, None, getitem_1, getitem_2, True, 1e-05, [True, True, True])
    grad: float32[2, 3, 4, 4] = back[0]
    return (getitem,), (grad, None, None, None)
""",
    )


def test_as_text_in_evaluation_they_are() -> None:
    before = """\
def joint(
    x: float32[2, 3, 4, 4],
    weight: float32[3],
    mean: float32[3],
    variance: float32[3],
    tangents_1: float32[2, 3, 4, 4],
):
    # captured
    norm: (float32[2, 3, 4, 4], float32[0], float32[0]) = aten.native_batch_norm.default(x, weight, None, mean, variance, False, 0.1, 1e-05)
    getitem: float32[2, 3, 4, 4] = norm[0]
    getitem_1: float32[0] = norm[1]
    getitem_2: float32[0] = norm[2]
    back: (float32[2, 3, 4, 4], float32[3], float32[3]) = aten.native_batch_norm_backward.default(tangents_1, x, weight, mean, variance, getitem_1, getitem_2, False, 1e-05, [True, True, True])
    grad: float32[2, 3, 4, 4] = back[0]
    return (getitem,), (grad, None, None, None)
"""
    made = after(release_running_statistics, before, name="batch_norm")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[2, 3, 4, 4],
    weight: float32[3],
    mean: float32[3],
    variance: float32[3],
    tangents_1: float32[2, 3, 4, 4],
):
    # captured
    norm: (float32[2, 3, 4, 4], float32[0], float32[0]) = aten.native_batch_norm.default(x, weight, None, mean, variance, False, 0.1, 1e-05)
    getitem: float32[2, 3, 4, 4] = norm[0]
    getitem_1: float32[0] = norm[1]
    getitem_2: float32[0] = norm[2]
    back: (float32[2, 3, 4, 4], float32[3], float32[3]) = aten.native_batch_norm_backward.default(tangents_1, x, weight, mean, variance, getitem_1, getitem_2, False, 1e-05, [True, True, True])
    grad: float32[2, 3, 4, 4] = back[0]
    return (getitem,), (grad, None, None, None)
""",
    )
