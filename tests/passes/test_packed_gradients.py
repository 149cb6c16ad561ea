"""A recurrent module adds to a weight's gradient in autograd's order."""

from __future__ import annotations

import expecttest

import roundpipe_fx.torch_private  # noqa: F401 - registers the operators
from roundpipe_fx.passes.packed_gradients import pass_sums_to_backward
from tests.graph_text import after


def test_as_text_the_backward_begins_with_what_was_added_before() -> None:
    before = """\
def joint(
    data: float32[6, 2],
    batch_sizes: int64[3],
    state: float32[1, 2, 2],
    w_in: float32[2, 2],  # parameter
    w_state: float32[2, 2],  # parameter
    tangents_1: float32[6, 2],
    tangents_2: float32[2, 2],
):
    # captured
    exp: float32[2, 2] = aten.exp.default(tangents_2)
    recur_backward: (float32[2, 2], float32[2, 2]) = torch.ops.roundpipe_fx.recur_backward.default([tangents_1], 'rnn_tanh', data, batch_sizes, [state], [w_in, w_state], False, 1, True, False, None, [False, False, True, True], [])
    of_w_in: float32[2, 2] = recur_backward[0]
    of_w_state: float32[2, 2] = recur_backward[1]
    add: float32[2, 2] = aten.add.Tensor(exp, of_w_state)
    return (), (None, None, None, of_w_in, add)
"""
    expecttest.assert_expected_inline(
        after(pass_sums_to_backward, before, name="packed_gradients"),
        """\
def joint(
    data: float32[6, 2],
    batch_sizes: int64[3],
    state: float32[1, 2, 2],
    w_in: float32[2, 2],  # parameter
    w_state: float32[2, 2],  # parameter
    tangents_1: float32[6, 2],
    tangents_2: float32[2, 2],
):
    # captured
    exp: float32[2, 2] = aten.exp.default(tangents_2)
    recur_backward: (float32[2, 2], float32[2, 2]) = torch.ops.roundpipe_fx.recur_backward.default([tangents_1], 'rnn_tanh', data, batch_sizes, [state], [w_in, w_state], False, 1, True, False, None, [False, False, True, True], [None, exp])
    of_w_in: float32[2, 2] = recur_backward[0]
    of_w_state: float32[2, 2] = recur_backward[1]
    return (), (None, None, None, of_w_in, of_w_state)
""",
    )


def test_as_text_what_is_added_later_is_added_later() -> None:
    before = """\
def joint(
    data: float32[6, 2],
    batch_sizes: int64[3],
    state: float32[1, 2, 2],
    w_in: float32[2, 2],  # parameter
    w_state: float32[2, 2],  # parameter
    tangents_1: float32[6, 2],
    tangents_2: float32[2, 2],
):
    # captured
    recur_backward: (float32[2, 2], float32[2, 2]) = torch.ops.roundpipe_fx.recur_backward.default([tangents_1], 'rnn_tanh', data, batch_sizes, [state], [w_in, w_state], False, 1, True, False, None, [False, False, True, True], [])
    of_w_in: float32[2, 2] = recur_backward[0]
    of_w_state: float32[2, 2] = recur_backward[1]
    exp: float32[2, 2] = aten.exp.default(tangents_2)
    add: float32[2, 2] = aten.add.Tensor(exp, of_w_state)
    return (), (None, None, None, of_w_in, add)
"""
    expecttest.assert_expected_inline(
        after(pass_sums_to_backward, before, name="packed_gradients"),
        """\
def joint(
    data: float32[6, 2],
    batch_sizes: int64[3],
    state: float32[1, 2, 2],
    w_in: float32[2, 2],  # parameter
    w_state: float32[2, 2],  # parameter
    tangents_1: float32[6, 2],
    tangents_2: float32[2, 2],
):
    # captured
    recur_backward: (float32[2, 2], float32[2, 2]) = torch.ops.roundpipe_fx.recur_backward.default([tangents_1], 'rnn_tanh', data, batch_sizes, [state], [w_in, w_state], False, 1, True, False, None, [False, False, True, True], [])
    of_w_in: float32[2, 2] = recur_backward[0]
    of_w_state: float32[2, 2] = recur_backward[1]
    exp: float32[2, 2] = aten.exp.default(tangents_2)
    add: float32[2, 2] = aten.add.Tensor(exp, of_w_state)
    return (), (None, None, None, of_w_in, add)
""",
    )


def test_as_text_a_gradient_that_is_read_alone_stays_alone() -> None:
    before = """\
def joint(
    data: float32[6, 2],
    batch_sizes: int64[3],
    state: float32[1, 2, 2],
    w_in: float32[2, 2],  # parameter
    w_state: float32[2, 2],  # parameter
    tangents_1: float32[6, 2],
    tangents_2: float32[2, 2],
):
    # captured
    exp: float32[2, 2] = aten.exp.default(tangents_2)
    recur_backward: (float32[2, 2], float32[2, 2]) = torch.ops.roundpipe_fx.recur_backward.default([tangents_1], 'rnn_tanh', data, batch_sizes, [state], [w_in, w_state], False, 1, True, False, None, [False, False, True, True], [])
    of_w_in: float32[2, 2] = recur_backward[0]
    of_w_state: float32[2, 2] = recur_backward[1]
    add: float32[2, 2] = aten.add.Tensor(exp, of_w_state)
    sin: float32[2, 2] = aten.sin.default(of_w_state)
    return (), (None, None, None, sin, add)
"""
    expecttest.assert_expected_inline(
        after(pass_sums_to_backward, before, name="packed_gradients"),
        """\
def joint(
    data: float32[6, 2],
    batch_sizes: int64[3],
    state: float32[1, 2, 2],
    w_in: float32[2, 2],  # parameter
    w_state: float32[2, 2],  # parameter
    tangents_1: float32[6, 2],
    tangents_2: float32[2, 2],
):
    # captured
    exp: float32[2, 2] = aten.exp.default(tangents_2)
    recur_backward: (float32[2, 2], float32[2, 2]) = torch.ops.roundpipe_fx.recur_backward.default([tangents_1], 'rnn_tanh', data, batch_sizes, [state], [w_in, w_state], False, 1, True, False, None, [False, False, True, True], [])
    of_w_in: float32[2, 2] = recur_backward[0]
    of_w_state: float32[2, 2] = recur_backward[1]
    add: float32[2, 2] = aten.add.Tensor(exp, of_w_state)
    sin: float32[2, 2] = aten.sin.default(of_w_state)
    return (), (None, None, None, sin, add)
""",
    )
