"""equal_collectives: what is sent alike is sent once, in text."""

from __future__ import annotations

import expecttest
import torch.distributed._functional_collectives  # noqa: F401 (registers the operators)

from roundpipe_fx.passes.equal_collectives import merge_equal_collectives
from tests.graph_text import after

GATHERED_TWICE = """\
def joint(
    x: float32[2, 8],
    tangents_1: float32[4, 8],
):
    # forward
    all_gather: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    wait_tensor: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather)
    sin: float32[4, 8] = aten.sin.default(wait_tensor)
    all_gather_1: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    wait_tensor_1: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather_1)
    mul: float32[4, 8] = aten.mul.Tensor(sin, wait_tensor_1)
    # backward
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, wait_tensor_1)
    reduce_scatter: float32[2, 8] = torch.ops._c10d_functional.reduce_scatter_tensor.default(mul_1, 'sum', 2, '0')
    wait_tensor_2: float32[2, 8] = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter)
    return (mul,), (wait_tensor_2,)
"""


def test_as_text_the_same_is_gathered_once() -> None:
    expecttest.assert_expected_inline(
        after(merge_equal_collectives, GATHERED_TWICE, name="equal_collectives"),
        """\
def joint(
    x: float32[2, 8],
    tangents_1: float32[4, 8],
):
    # forward
    all_gather: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    wait_tensor: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather)
    sin: float32[4, 8] = aten.sin.default(wait_tensor)
    mul: float32[4, 8] = aten.mul.Tensor(sin, wait_tensor)
    # backward
    mul_1: float32[4, 8] = aten.mul.Tensor(tangents_1, wait_tensor)
    reduce_scatter: float32[2, 8] = torch.ops._c10d_functional.reduce_scatter_tensor.default(mul_1, 'sum', 2, '0')
    wait_tensor_2: float32[2, 8] = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter)
    return (mul,), (wait_tensor_2,)
""",
    )


def test_as_text_what_the_forward_returns_is_a_tensor_of_its_own() -> None:
    before = """\
def joint(
    x: float32[2, 8],
):
    # forward
    all_gather: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    wait_tensor: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather)
    all_gather_1: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    wait_tensor_1: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather_1)
    return (wait_tensor, wait_tensor_1), (None,)
"""
    assert after(merge_equal_collectives, before, name="equal_collectives") == before
