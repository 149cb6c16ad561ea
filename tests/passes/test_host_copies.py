from __future__ import annotations

import expecttest
import pytest

from roundpipe_fx.ir.decisions import ValueOnHost
from roundpipe_fx.ir.text import graph_text
from roundpipe_fx.passes.host_copies import copy_back, copy_to_host
from roundpipe_fx.passes.overlap_recompute import overlap_recompute
from roundpipe_fx.torch_private import offload_operators
from tests.graph_text import program_of

pytestmark = pytest.mark.skipif(
    offload_operators() is None, reason="this PyTorch has no operators that copy to the host"
)

COPIES = [
    ValueOnHost(
        value="exp",
        name="exp",
        freed="stage_1_forward",
        reloaded="stage_1_backward",
        back="stage_0_recompute",
    ),
    ValueOnHost(
        value="tanh",
        name="tanh",
        freed="stage_2_forward",
        reloaded="stage_2_backward",
        back="stage_1_backward",
    ),
]


def test_as_text_values_are_returned_on_the_host() -> None:
    before = """\
def graph(
    x: float32[4, 8],
):
    stage_0_forward = stage_0_forward([x])
    exp: float32[4, 8] = stage_0_forward[0]
    add: float32[4, 8] = stage_0_forward[1]
    stage_1_forward = stage_1_forward([add])
    tanh: float32[4, 8] = stage_1_forward[0]
    stage_2_forward = stage_2_forward([tanh])
    mul: float32[4, 8] = stage_2_forward[0]
    return (mul, exp, tanh)
"""
    expecttest.assert_expected_inline(
        graph_text(copy_to_host(program_of(before), COPIES)),
        """\
def graph(
    x: float32[4, 8],
):
    stage_0_forward = stage_0_forward([x])
    exp: float32[4, 8] = stage_0_forward[0]
    add: float32[4, 8] = stage_0_forward[1]
    exp_leaving: float32[4, 8] = torch.ops.ao.offload.default(exp)
    stage_1_forward = stage_1_forward([add])
    tanh: float32[4, 8] = stage_1_forward[0]
    exp_on_host: float32[4, 8] = torch.ops.ao.wait_tensor.default(exp_leaving, None, exp)
    tanh_leaving: float32[4, 8] = torch.ops.ao.offload.default(tanh)
    stage_2_forward = stage_2_forward([tanh])
    mul: float32[4, 8] = stage_2_forward[0]
    tanh_on_host: float32[4, 8] = torch.ops.ao.wait_tensor.default(tanh_leaving, None, tanh)
    return (mul, exp_on_host, tanh_on_host)
""",
    )


def test_as_text_values_come_back_before_they_are_read() -> None:
    before = """\
def graph(
    exp: float32[4, 8],  # saved
    tanh: float32[4, 8],  # saved
    tangents_1: float32[4, 8],
):
    stage_2_backward = stage_2_backward([tangents_1])
    mm: float32[4, 8] = stage_2_backward[0]
    stage_1_backward = stage_1_backward([tanh, mm])
    mm_1: float32[4, 8] = stage_1_backward[0]
    stage_0_recompute = stage_0_recompute([exp])
    mul: float32[4, 8] = stage_0_recompute[0]
    stage_0_backward = stage_0_backward([exp, mul, mm_1])
    mm_2: float32[4, 8] = stage_0_backward[0]
    return (mm_2,)
"""
    expecttest.assert_expected_inline(
        graph_text(copy_back(program_of(before), COPIES)),
        """\
def graph(
    exp: float32[4, 8],
    tanh: float32[4, 8],
    tangents_1: float32[4, 8],
):
    tanh_returning: float32[4, 8] = torch.ops.ao.reload.default(tanh, 'cpu', [4, 8], [8, 1])
    stage_2_backward = stage_2_backward([tangents_1])
    mm: float32[4, 8] = stage_2_backward[0]
    exp_returning: float32[4, 8] = torch.ops.ao.reload.default(exp, 'cpu', [4, 8], [8, 1])
    tanh_back: float32[4, 8] = torch.ops.ao.wait_tensor.default(tanh_returning, None, tanh)
    stage_1_backward = stage_1_backward([tanh_back, mm])
    mm_1: float32[4, 8] = stage_1_backward[0]
    exp_back: float32[4, 8] = torch.ops.ao.wait_tensor.default(exp_returning, None, exp)
    stage_0_recompute = stage_0_recompute([exp_back])
    mul: float32[4, 8] = stage_0_recompute[0]
    stage_0_backward = stage_0_backward([exp_back, mul, mm_1])
    mm_2: float32[4, 8] = stage_0_backward[0]
    return (mm_2,)
""",
    )


def test_memory_of_values_that_come_back_is_of_the_main_stream() -> None:
    """A call on another stream begins behind the copy."""
    before = """\
def graph(
    exp: float32[4, 8],  # saved
    sin: float32[4, 8],  # saved
    tangents_1: float32[4, 8],
):
    stage_2_backward = stage_2_backward([tangents_1])
    mm: float32[4, 8] = stage_2_backward[0]
    stage_1_recompute = stage_1_recompute([sin])
    mul: float32[4, 8] = stage_1_recompute[0]
    stage_1_backward = stage_1_backward([mul, mm])
    mm_1: float32[4, 8] = stage_1_backward[0]
    stage_0_backward = stage_0_backward([exp, mm_1])
    mm_2: float32[4, 8] = stage_0_backward[0]
    return (mm_2,)
"""
    program = overlap_recompute(program_of(before), ["stage_1_recompute"])
    exp = ValueOnHost(
        value="exp",
        name="exp",
        freed="stage_1_forward",
        reloaded="stage_1_recompute",
        back="stage_0_backward",
    )
    nodes = {str(node.target): place for place, node in enumerate(copy_back(program, [exp]).nodes)}
    assert nodes["ao.reload.default"] == nodes["streams.fork.default"] - 1
