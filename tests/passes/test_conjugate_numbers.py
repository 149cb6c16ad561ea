from __future__ import annotations

import expecttest
import pytest
import torch

from roundpipe_fx.passes.conjugate_numbers import fold_conjugate_numbers
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.graph_text import after

aten = torch.ops.aten


def _times(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x) * (1 + 2j) / (3 - 1j)).sin().sum()


def _of_one_number(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x).sum() * (1 + 2j)).sin().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_reads_a_number(dtype: torch.dtype) -> None:
    joint = capture_joint(_times, torch.randn(4, 5, 2, dtype=dtype, requires_grad=True))
    inputs = example_inputs(joint)
    before = run_joint(joint, inputs)
    assert joint.graph.find_nodes(op="call_function", target=aten._conj.default)
    joint = fold_conjugate_numbers(joint)
    assert not joint.graph.find_nodes(op="call_function", target=aten._conj.default)
    for one, other in zip(run_joint(joint, inputs), before, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_a_single_number_keeps_its_type() -> None:
    """Of two single numbers the one with more bits says the type, and a plain number has none."""
    joint = fold_conjugate_numbers(capture_joint(_of_one_number, torch.randn(4, 2, requires_grad=True)))
    assert joint.graph.find_nodes(op="call_function", target=aten._conj.default)


def test_as_text_products_and_quotients_read_the_number() -> None:
    before = """\
def joint(
    x: complex64[4],
):
    # captured
    _conj: complex128[] = aten._conj.default((3-1j))
    div: complex64[4] = aten.div.Tensor(x, _conj)
    _conj_1: complex128[] = aten._conj.default((1+2j))
    mul: complex64[4] = aten.mul.Tensor(div, _conj_1)
    return (mul,), ()
"""
    expecttest.assert_expected_inline(
        after(fold_conjugate_numbers, before, name="conjugate_numbers"),
        """\
def joint(
    x: complex64[4],
):
    # captured
    div: complex64[4] = aten.div.Tensor(x, (3+1j))
    mul: complex64[4] = aten.mul.Tensor(div, (1-2j))
    return (mul,), ()
""",
    )


def test_as_text_what_other_operators_read_stays() -> None:
    before = """\
def joint(
    x: complex64[4],
):
    # captured
    _conj: complex128[] = aten._conj.default((1+2j))
    mul: complex64[4] = aten.mul.Tensor(x, _conj)
    add: complex64[4] = aten.add.Tensor(mul, _conj)
    return (add,), ()
"""
    expecttest.assert_expected_inline(
        after(fold_conjugate_numbers, before, name="conjugate_numbers"),
        """\
def joint(
    x: complex64[4],
):
    # captured
    _conj: complex128[] = aten._conj.default((1+2j))
    mul: complex64[4] = aten.mul.Tensor(x, (1-2j))
    add: complex64[4] = aten.add.Tensor(mul, _conj)
    return (add,), ()
""",
    )


def test_as_text_a_product_of_single_numbers_keeps_its_type() -> None:
    before = """\
def joint(
    x: complex64[],
):
    # captured
    _conj: complex128[] = aten._conj.default((1+2j))
    mul: complex128[] = aten.mul.Tensor(x, _conj)
    return (mul,), ()
"""
    expecttest.assert_expected_inline(
        after(fold_conjugate_numbers, before, name="conjugate_numbers"),
        """\
def joint(
    x: complex64[],
):
    # captured
    _conj: complex128[] = aten._conj.default((1+2j))
    mul: complex128[] = aten.mul.Tensor(x, _conj)
    return (mul,), ()
""",
    )
