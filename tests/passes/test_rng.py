"""What is drawn twice is replayed."""

from __future__ import annotations

import expecttest

from roundpipe_fx.passes.rng import replay_rng
from tests.graph_text import CPU, after


def test_as_text_what_is_drawn_twice_is_replayed() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward, stage 0, segment 0
    rand_1: float32[4, 8] = aten.rand_like.default(x)  # repeats: rand
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand_1)
    return (mul,), (mul_1,)
"""
    made = after(replay_rng, before, CPU, name="rng")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    run_and_save_rng_state: (uint8[5056], float32[4, 8]) = torch.ops.higher_order.run_and_save_rng_state(aten.rand_like.default, x)  # replayed
    rand_rng_state: uint8[5056] = run_and_save_rng_state[0]
    getitem: float32[4, 8] = run_and_save_rng_state[1]
    mul: float32[4, 8] = aten.mul.Tensor(x, getitem)
    # backward, stage 0, segment 0
    run_with_rng_state: float32[4, 8] = torch.ops.higher_order.run_with_rng_state(rand_rng_state, aten.rand_like.default, x)  # repeats: rand; workspace: 5056; replayed
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, run_with_rng_state)
    return (mul,), (mul_1,)
""",
    )


def test_as_text_what_is_saved_is_drawn_as_it_was() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward, stage 0, segment 0
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand)
    return (mul,), (mul_1,)
"""
    made = after(replay_rng, before, CPU, name="rng")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    rand: float32[4, 8] = aten.rand_like.default(x)
    mul: float32[4, 8] = aten.mul.Tensor(x, rand)
    # backward, stage 0, segment 0
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, rand)
    return (mul,), (mul_1,)
""",
    )
