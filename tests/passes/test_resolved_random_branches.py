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
