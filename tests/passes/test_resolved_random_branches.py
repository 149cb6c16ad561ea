"""What was drawn for a branch that is known stays drawn."""

from __future__ import annotations

import expecttest

from roundpipe_fx.passes.resolved_random_branches import release_resolved_random_branches
from tests.graph_text import after


def test_as_text_the_reader_goes_and_the_draw_stays() -> None:
    before = """\
def joint(
    x: float32[4],
):
    # captured
    rand: float32[4] = aten.rand.default([4])
    resolved_random_branch: NoneType = torch.ops.roundpipe_fx.resolved_random_branch.default(rand)
    neg: float32[4] = aten.neg.default(x)
    return (neg,), ()
"""
    made = after(release_resolved_random_branches, before, name="resolved_random_branches")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4],
):
    # captured
    rand: float32[4] = aten.rand.default([4])
    neg: float32[4] = aten.neg.default(x)
    return (neg,), ()
""",
    )


def test_as_text_only_readers_go() -> None:
    before = """\
def joint(
    x: float32[4],
):
    # captured
    rand: float32[4] = aten.rand.default([4])
    mul: float32[4] = aten.mul.Tensor(x, rand)
    rand_1: float32[4] = aten.rand.default([4])
    resolved_random_branch: NoneType = torch.ops.roundpipe_fx.resolved_random_branch.default(rand_1)
    rand_2: float32[4] = aten.rand.default([4])
    resolved_random_branch_1: NoneType = torch.ops.roundpipe_fx.resolved_random_branch.default(rand_2)
    return (mul,), ()
"""
    expecttest.assert_expected_inline(
        after(release_resolved_random_branches, before, name="resolved_random_branches"),
        """\
def joint(
    x: float32[4],
):
    # captured
    rand: float32[4] = aten.rand.default([4])
    mul: float32[4] = aten.mul.Tensor(x, rand)
    rand_1: float32[4] = aten.rand.default([4])
    rand_2: float32[4] = aten.rand.default([4])
    return (mul,), ()
""",
    )
