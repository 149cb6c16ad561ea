from __future__ import annotations

import expecttest
import pytest

from roundpipe_fx.passes.unread_outputs import drop_unread_outputs
from tests.graph_text import after

HEAD = """
def joint(
    hidden: float32[4, 8],
    words: float32[64, 8],  # parameter
    tangents_1: float32[],
):
    # forward
    tanh: float32[4, 8] = aten.tanh.default(hidden)
    t: float32[8, 64].strides(1, 8) = aten.t.default(words)
    mm: float32[4, 64] = aten.mm.default(tanh, t)
    scores: float32[4, 64] = aten.{cap}.default(mm)
    view: float32[2, 2, 64] = aten.view.default(scores, [2, 2, 64])
    loss: float32[] = aten.sum.default(scores)
    # backward
    ones: float32[4, 64].strides(0, 0) = aten.expand.default(tangents_1, [4, 64])
    narrow: float32[4, 8] = aten.mm.default(ones, words)
    return (loss, {returned}), (narrow, None)
"""


def test_as_text_the_narrow_value_is_returned() -> None:
    joint = after(
        lambda joint: drop_unread_outputs(joint, [1]), HEAD.format(cap="neg", returned="view"), name="unread_outputs"
    )
    expecttest.assert_expected_inline(
        joint,
        """\
def joint(
    hidden: float32[4, 8],
    words: float32[64, 8],  # parameter
    tangents_1: float32[],
):
    # forward
    tanh: float32[4, 8] = aten.tanh.default(hidden)
    t: float32[8, 64].strides(1, 8) = aten.t.default(words)
    mm: float32[4, 64] = aten.mm.default(tanh, t)
    scores: float32[4, 64] = aten.neg.default(mm)
    loss: float32[] = aten.sum.default(scores)
    # backward
    ones: float32[4, 64].strides(0, 0) = aten.expand.default(tangents_1, [4, 64])
    narrow: float32[4, 8] = aten.mm.default(ones, words)
    return (loss, tanh), (narrow, None)
""",
    )


def test_as_text_scores_that_are_drawn_stay() -> None:
    """Whoever read them later would get other ones."""
    text = HEAD.format(cap="bernoulli", returned="view")
    left = after(lambda joint: drop_unread_outputs(joint, [1]), text, name="unread_outputs")
    assert left == after(lambda joint: joint, text, name="unread_outputs")


@pytest.mark.parametrize(
    ("cap", "returned", "outputs"),
    [
        ("neg", "view", [0]),  # the loss is computed from a value that is wider
        ("neg", "tanh", [1]),  # narrow itself
        ("neg", "view, scores", [1]),  # something else returned shares its memory
    ],
)
def test_other_outputs_stay(cap: str, returned: str, outputs: list[int]) -> None:
    text = HEAD.format(cap=cap, returned=returned)
    left = after(lambda joint: drop_unread_outputs(joint, outputs), text, name="unread_outputs")
    assert left == after(lambda joint: joint, text, name="unread_outputs")
