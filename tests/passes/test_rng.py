"""What is drawn twice is replayed."""

from __future__ import annotations

import expecttest
import pytest

from roundpipe_fx.ir.joint_graph import Mark
from roundpipe_fx.passes.rng import replay_rng
from tests.graph_text import CPU, after, joint_of


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


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_replayed_attention_costs_what_it_did(dropout: float) -> None:
    """Attention with dropout is replayed. Its flops are known, those of the higher-order operation are not."""
    joint = joint_of(
        f"""\
def joint(
    x: float32[2, 4, 16, 8],
    tangents_1: float32[2, 4, 16, 8],
):
    # forward, stage 0, segment 0
    attention: (float32[2, 4, 16, 8], float32[2, 4, 16]) = aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x, {dropout})
    found: float32[2, 4, 16, 8] = attention[0]
    # backward, stage 0, segment 0
    attention_1: (float32[2, 4, 16, 8], float32[2, 4, 16]) = aten._scaled_dot_product_flash_attention_for_cpu.default(x, x, x, {dropout})  # repeats: attention
    found_1: float32[2, 4, 16, 8] = attention_1[0]
    mul: float32[2, 4, 16, 8] = aten.mul.Tensor(tangents_1, found_1)
    return (found,), (mul,)
"""
    )

    def costs() -> list[tuple[int, float]]:
        nodes = [node for node in joint.computed() if "attention" in str((node.target, node.args))]
        return [(node.meta[Mark.FLOPS], node.meta[Mark.SECONDS]) for node in nodes if node.meta[Mark.FLOPS]]

    before = costs()
    assert len(before) == 2
    replay_rng(joint, CPU)
    assert costs() == before
    assert any(Mark.REPLAYED in node.meta for node in joint.computed()) == (dropout > 0)
