"""What nobody reads is dropped."""

from __future__ import annotations

import expecttest

from roundpipe_fx.ir.joint_graph import JointGraph
from tests.graph_text import after


def _unread(joint: JointGraph) -> JointGraph:
    joint.drop_unread()
    return joint


def test_as_text_what_nobody_reads_goes_with_what_only_it_reads() -> None:
    before = """\
def joint(
    x: float32[4],
    tangents_1: float32[4],
):
    # captured
    exp: float32[4] = aten.exp.default(x)
    sin: float32[4] = aten.sin.default(exp)
    cos: float32[4] = aten.cos.default(sin)
    mul: float32[4] = aten.mul.Tensor(tangents_1, exp)
    return (exp,), (mul,)
"""
    expecttest.assert_expected_inline(
        after(_unread, before, name="dce"),
        """\
def joint(
    x: float32[4],
    tangents_1: float32[4],
):
    # captured
    exp: float32[4] = aten.exp.default(x)
    mul: float32[4] = aten.mul.Tensor(tangents_1, exp)
    return (exp,), (mul,)
""",
    )


def test_as_text_what_draws_random_numbers_stays() -> None:
    before = """\
def joint(
    x: float32[4],
):
    # captured
    rand: float32[4] = aten.rand.default([4])
    sin: float32[4] = aten.sin.default(rand)
    exp: float32[4] = aten.exp.default(x)
    return (exp,), ()
"""
    expecttest.assert_expected_inline(
        after(_unread, before, name="dce"),
        """\
def joint(
    x: float32[4],
):
    # captured
    rand: float32[4] = aten.rand.default([4])
    exp: float32[4] = aten.exp.default(x)
    return (exp,), ()
""",
    )
