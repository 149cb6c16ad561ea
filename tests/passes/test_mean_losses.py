from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundpipe_fx.analysis.cost import cost_model
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.mean_losses import split_mean_losses
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import CPU, after

CROSS_ENTROPY = """
def joint(
    primals_1: float32[6, 8],
    primals_2: int64[6],
    tangents_1: float32[],
):
    # forward
    nll: (float32[], float32[]) = aten.nll_loss_forward.default(primals_1, primals_2, None, 1, -100)
    loss: float32[] = nll[0]
    weight: float32[] = nll[1]
    # backward
    back: float32[6, 8] = aten.nll_loss_backward.default(tangents_1, primals_1, primals_2, None, 1, -100, weight)
    return (loss,), (back, None)
"""

SQUARES = """
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[6, 8],
    tangents_1: float32[],
):
    # forward
    loss: float32[] = aten.mse_loss.default(primals_1, primals_2)
    # backward
    back: float32[6, 8] = aten.mse_loss_backward.default(tangents_1, primals_1, primals_2, 1)
    return (loss,), (back, None)
"""


def test_as_text_the_count_is_known_before_the_loss() -> None:
    expecttest.assert_expected_inline(
        after(split_mean_losses, CROSS_ENTROPY, CPU, name="mean_losses"),
        """\
def joint(
    primals_1: float32[6, 8],
    primals_2: int64[6],
    tangents_1: float32[],
):
    # forward
    ne_scalar: bool[6] = aten.ne.Scalar(primals_2, -100)
    sum_dim_int_list: float32[] = aten.sum.dim_IntList(ne_scalar, None, dtype=torch.float32)
    nll_loss_forward_default_1: (float32[], float32[]) = aten.nll_loss_forward.default(primals_1, primals_2, None, 2, -100)
    getitem_2: float32[] = nll_loss_forward_default_1[0]
    div_tensor: float32[] = aten.div.Tensor(getitem_2, sum_dim_int_list)
    # backward
    back: float32[6, 8] = aten.nll_loss_backward.default(tangents_1, primals_1, primals_2, None, 1, -100, sum_dim_int_list)
    return (div_tensor,), (back, None)
""",
    )


def test_as_text_gradients_are_divided_first() -> None:
    expecttest.assert_expected_inline(
        after(split_mean_losses, SQUARES, CPU, name="mean_losses"),
        """\
def joint(
    primals_1: float32[6, 8],
    primals_2: float32[6, 8],
    tangents_1: float32[],
):
    # forward
    mse_loss_default_1: float32[] = aten.mse_loss.default(primals_1, primals_2, reduction=2)
    div_tensor: float32[] = aten.div.Tensor(mse_loss_default_1, 48)
    # backward
    div_tensor_1: float32[] = aten.div.Tensor(tangents_1, 48)
    mse_loss_backward_default_1: float32[6, 8] = aten.mse_loss_backward.default(div_tensor_1, primals_1, primals_2, 2)
    return (div_tensor,), (mse_loss_backward_default_1, None)
""",
    )


def test_as_text_sums_stay() -> None:
    text = CROSS_ENTROPY.replace("None, 1,", "None, 2,")
    assert after(split_mean_losses, text, CPU, name="mean_losses").split() == text.split()


class Loss(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("weight", torch.rand(5, dtype=torch.float64) + 0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        images = x.reshape(2, 5, 3, 4)
        return {
            "cross entropy": lambda: F.cross_entropy(x, labels),
            "weighted": lambda: F.cross_entropy(x, labels, weight=self.weight, ignore_index=1),
            "smoothed": lambda: F.cross_entropy(x, labels, label_smoothing=0.1),
            "of images": lambda: F.cross_entropy(images, labels.reshape(2, 3, 4), weight=self.weight),
            "one row": lambda: F.cross_entropy(x[0], labels[0]),
            "all ignored": lambda: F.cross_entropy(x, torch.full_like(labels, -100)),
            "squares": lambda: F.mse_loss(x, x.detach().flip(0)),
            "smooth": lambda: F.smooth_l1_loss(x, x.detach().flip(0), beta=0.3),
            "huber": lambda: F.huber_loss(x, x.detach().flip(0), delta=0.3),
            "mean": lambda: (x * x).mean(),
        }[self.kind]()


@pytest.mark.parametrize(
    "kind",
    [
        "cross entropy",
        "weighted",
        "smoothed",
        "of images",
        "one row",
        "all ignored",
        "squares",
        "smooth",
        "huber",
        "mean",
    ],
)
def test_losses_and_gradients_stay_the_same(kind: str) -> None:
    x = torch.randn(24, 5, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (24,))
    labels[3:6] = -100
    joint = capture_joint(Loss(kind), x, labels)
    inputs = example_inputs(joint)
    before = run_joint(joint, inputs)
    annotate(joint, cost_model("roofline", torch.device("cpu")))
    changed = run_joint(split_mean_losses(joint, CPU), inputs)
    for one, other in zip(before, changed, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=0, equal_nan=True)
