from __future__ import annotations

from collections.abc import Callable

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe_fx.analysis.tiling import find_online_softmaxes
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.ir.text import joint_text
from roundpipe_fx.ir.verifier import snapshot, verify
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.mean_losses import split_mean_losses
from roundpipe_fx.passes.online_softmax import rewrite_online
from tests.capturing import capture_joint, run_joint
from tests.cross_entropies import CLASS_WEIGHTS, CROSS_ENTROPIES
from tests.graph_text import CPU, joint_of

HEAD = """
def joint(
    primals_1: float32[6, 64],
    primals_2: int64[6],
    tangents_1: float32[],
):
    # forward
    scores: float32[6, 64] = aten._log_softmax.default(primals_1, 1, False)
    nll: (float32[], float32[]) = aten.nll_loss_forward.default(scores, primals_2, None, 2, -100)
    loss: float32[] = nll[0]
    # backward
    ones: float32[] = aten.full.default([], 1.0)
    nll_loss_backward: float32[6, 64] = aten.nll_loss_backward.default(tangents_1, scores, primals_2, None, 2, -100, ones)
    back: float32[6, 64] = aten._log_softmax_backward_data.default(nll_loss_backward, scores, 1, torch.float32)
    return (loss,), (back, None)
"""

SUM = """
def joint(
    primals_1: float32[6, 64],
    tangents_1: float32[6],
):
    # forward
    scores: float32[6, 64] = aten._log_softmax.default(primals_1, 1, False)
    neg: float32[6, 64] = aten.neg.default(scores)
    sum_1: float32[6] = aten.sum.dim_IntList(neg, [1])
    # backward
    column: float32[6, 1] = aten.unsqueeze.default(tangents_1, 1)
    expand: float32[6, 64].strides(1, 0) = aten.expand.default(column, [6, 64])
    neg_1: float32[6, 64] = aten.neg.default(expand)
    back: float32[6, 64] = aten._log_softmax_backward_data.default(neg_1, scores, 1, torch.float32)
    return (sum_1,), (back,)
"""

ENTROPY = """
def joint(
    primals_1: float32[6, 64],
):
    # forward
    scores: float32[6, 64] = aten._log_softmax.default(primals_1, 1, False)
    exp: float32[6, 64] = aten.exp.default(scores)
    mul: float32[6, 64] = aten.mul.Tensor(exp, scores)
    sum_1: float32[6] = aten.sum.dim_IntList(mul, [1])
    return (sum_1,), ()
"""


def written(text: str) -> str:
    joint = joint_of(text)
    before = snapshot(joint)
    made = rewrite_online(joint, find_online_softmaxes(joint), CPU)
    verify(made, "online_softmax", before, {"online_softmax"})
    return joint_text(made)


def test_as_text_a_cross_entropy() -> None:
    """Rows are numbers that are sums over classes; labels are checked, as the loss checks them."""
    expecttest.assert_expected_inline(
        written(HEAD),
        """\
def joint(
    primals_1: float32[6, 64],
    primals_2: int64[6],
    tangents_1: float32[],
):
    # forward
    scores_log_sum_exp: float64[6, 1] = torch.ops.roundpipe_fx.log_sum_exp.default(primals_1, [1])
    scores__to_copy: float32[6, 1] = aten._to_copy.default(scores_log_sum_exp, dtype=torch.float32)
    scores_sub: float64[6, 1] = aten.sub.Tensor(scores_log_sum_exp, scores__to_copy)
    scores__to_copy_1: float32[6, 1] = aten._to_copy.default(scores_sub, dtype=torch.float32)
    scores_arange: int32[64] = aten.arange.default(64, dtype=torch.int32, device=device(type='cpu'), pin_memory=False)
    scores_reshape: int64[6, 1] = aten.reshape.default(primals_2, [6, 1])
    scores_eq: bool[6, 1] = aten.eq.Scalar(scores_reshape, -100)
    scores_masked_fill: int64[6, 1] = aten.masked_fill.Scalar(scores_reshape, scores_eq, 0)
    scores_reshape_1: int64[6] = aten.reshape.default(scores_masked_fill, [-1])
    scores_index_select: int32[6] = aten.index_select.default(scores_arange, 0, scores_reshape_1)
    scores_reshape_2: int32[6, 1] = aten.reshape.default(scores_index_select, [6, 1])
    scores_ne: bool[6, 64] = aten.ne.Tensor(scores_arange, scores_reshape_2)
    scores_masked_fill_1: float32[6, 64] = aten.masked_fill.Scalar(primals_1, scores_ne, 0.0)
    scores_sum: float32[6, 1] = aten.sum.dim_IntList(scores_masked_fill_1, [1], True)
    scores_sub_1: float64[6, 1] = aten.sub.Tensor(scores_sum, scores_log_sum_exp)
    scores__to_copy_2: float32[6, 1] = aten._to_copy.default(scores_sub_1, dtype=torch.float32)
    scores_neg: float32[6, 1] = aten.neg.default(scores__to_copy_2)
    scores_masked_fill_2: float32[6, 1] = aten.masked_fill.Scalar(scores_neg, scores_eq, 0.0)
    scores_sum_1: float32[] = aten.sum.default(scores_masked_fill_2)
    # backward
    scores_neg_1: float32[] = aten.neg.default(tangents_1)
    scores_masked_fill_3: float32[6, 1] = aten.masked_fill.Scalar(scores_neg_1, scores_eq, 0.0)
    scores_expand: float32[6, 64].strides(1, 0) = aten.expand.default(scores_masked_fill_3, [6, 64])
    scores_masked_fill_4: float32[6, 64] = aten.masked_fill.Scalar(scores_expand, scores_ne, 0.0)
    scores_sub_2: float32[6, 64] = aten.sub.Tensor(primals_1, scores__to_copy)
    scores_sub_3: float32[6, 64] = aten.sub.Tensor(scores_sub_2, scores__to_copy_1)
    scores_exp: float32[6, 64] = aten.exp.default(scores_sub_3)
    scores_mul: float32[6, 64] = aten.mul.Tensor(scores_exp, scores_masked_fill_3)
    scores_sub_4: float32[6, 64] = aten.sub.Tensor(scores_masked_fill_4, scores_mul)
    return (scores_sum_1,), (scores_sub_4, None)
""",
    )


def test_as_text_a_sum_over_classes() -> None:
    expecttest.assert_expected_inline(
        written(SUM),
        """\
def joint(
    primals_1: float32[6, 64],
    tangents_1: float32[6],
):
    # forward
    scores_log_sum_exp: float64[6, 1] = torch.ops.roundpipe_fx.log_sum_exp.default(primals_1, [1])
    scores__to_copy: float32[6, 1] = aten._to_copy.default(scores_log_sum_exp, dtype=torch.float32)
    scores_sub: float64[6, 1] = aten.sub.Tensor(scores_log_sum_exp, scores__to_copy)
    scores__to_copy_1: float32[6, 1] = aten._to_copy.default(scores_sub, dtype=torch.float32)
    scores_sum: float32[6, 1] = aten.sum.dim_IntList(primals_1, [1], True)
    scores_mul: float64[6, 1] = aten.mul.Scalar(scores_log_sum_exp, 64)
    scores_sub_1: float64[6, 1] = aten.sub.Tensor(scores_sum, scores_mul)
    scores__to_copy_2: float32[6, 1] = aten._to_copy.default(scores_sub_1, dtype=torch.float32)
    scores_neg: float32[6, 1] = aten.neg.default(scores__to_copy_2)
    scores_reshape: float32[6] = aten.reshape.default(scores_neg, [6])
    # backward
    column: float32[6, 1] = aten.unsqueeze.default(tangents_1, 1)
    scores_neg_1: float32[6, 1] = aten.neg.default(column)
    scores_mul_1: float32[6, 1] = aten.mul.Scalar(scores_neg_1, 64)
    scores_sub_2: float32[6, 64] = aten.sub.Tensor(primals_1, scores__to_copy)
    scores_sub_3: float32[6, 64] = aten.sub.Tensor(scores_sub_2, scores__to_copy_1)
    scores_exp: float32[6, 64] = aten.exp.default(scores_sub_3)
    scores_mul_2: float32[6, 64] = aten.mul.Tensor(scores_exp, scores_mul_1)
    scores_sub_4: float32[6, 64] = aten.sub.Tensor(scores_neg_1, scores_mul_2)
    return (scores_reshape,), (scores_sub_4,)
""",
    )


def test_as_text_what_needs_all_classes_of_a_row_stays() -> None:
    assert written(ENTROPY).strip() == ENTROPY.strip()


class Head(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.head, self.loss = nn.Linear(8, 40).double(), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.head(x), y)


def summed_graph(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[JointGraph, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, labels = Head(loss), torch.randint(0, 40, (2, 5))
    labels[0, 1] = labels[1, 3] = -100
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    joint = split_mean_losses(annotate(capture_joint(model, x, labels), CPU), CPU)
    given: list[torch.Tensor] = []
    known = {(40, 8): model.head.weight, (40,): model.head.bias, (2, 5, 8): x, (2, 5): labels, (): torch.tensor(0.7)}
    for node in joint.inputs:
        value = node.meta["val"]
        found = CLASS_WEIGHTS if joint.label(node) == "CLASS_WEIGHTS" else known[tuple(value.shape)]
        given.append(found.detach().to(value.dtype))
    return joint, given


@pytest.mark.parametrize("name", CROSS_ENTROPIES)
def test_losses_and_gradients_are_the_same(name: str) -> None:
    joint, given = summed_graph(CROSS_ENTROPIES[name])
    expected = run_joint(joint, given)
    names = find_online_softmaxes(joint)
    assert names
    found = run_joint(rewrite_online(joint, names, CPU), given)
    assert not any(node.target is torch.ops.aten._log_softmax.default for node in joint.graph.nodes)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "entropy": lambda scores, _: (scores.softmax(-1) * F.log_softmax(scores, -1)).sum(),
    "divergence": lambda scores, _: F.kl_div(F.log_softmax(scores, -1), scores.detach().softmax(-1), reduction="sum"),
    "largest": lambda scores, _: F.log_softmax(scores, -1).amax(-1).sum(),
    "squares": lambda scores, _: F.log_softmax(scores, -1).square().sum(),
    "probabilities": lambda scores, labels: F.nll_loss(scores.softmax(-1).flatten(0, 1), labels.flatten()),
    "over rows": lambda scores, labels: F.nll_loss(F.log_softmax(scores, 1).flatten(0, 1), labels.flatten()),
    "other classes": lambda scores, labels: (
        F.log_softmax(scores, -1).gather(-1, labels[:, :, None].expand(2, 5, 3) % 40).sum()
    ),
    "soft labels": lambda scores, _: F.cross_entropy(scores.flatten(0, 1), torch.full((10, 40), 1 / 40).double()),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_reads_more_of_a_row_stays(name: str) -> None:
    joint, _ = summed_graph(MIXED[name])
    assert not find_online_softmaxes(joint)


def test_a_returned_one_stays() -> None:
    def loss(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probabilities = F.log_softmax(scores, -1)
        return F.nll_loss(log_probabilities.flatten(0, 1), labels.flatten()), log_probabilities

    model = Head(loss)  # type: ignore[arg-type]
    x, labels = torch.randn(2, 5, 8).double(), torch.randint(0, 40, (2, 5))
    joint = split_mean_losses(annotate(capture_joint(model, x, labels), CPU), CPU)
    assert not find_online_softmaxes(joint)
