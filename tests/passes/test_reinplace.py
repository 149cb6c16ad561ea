from __future__ import annotations

import expecttest
import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from roundpipe_fx.ir.text import graph_text
from roundpipe_fx.passes.reinplace import reinplace
from tests.graph_text import joint_of

aten = torch.ops.aten


def _targets(function, *inputs: torch.Tensor) -> list[str]:
    """Operators after the pass; the rewritten graph is held against the function, inputs untouched."""
    with FakeTensorMode() as mode:
        module = make_fx(function)(*(mode.from_tensor(value) for value in inputs))
    reinplace(module.graph)
    module.recompile()
    before = [value.clone() for value in inputs]
    found, expected = module(*inputs), function(*before)
    for left, right in zip(
        found if isinstance(found, tuple) else (found,),
        expected if isinstance(expected, tuple) else (expected,),
        strict=True,
    ):
        assert torch.equal(left, right)
    assert all(torch.equal(value, old) for value, old in zip(inputs, before, strict=True))
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


X = torch.randn(4, 4)


def test_dead_operand_is_written_over() -> None:
    assert _targets(lambda x: x.exp().add(1).mul(2), X) == ["aten.exp.default", "aten.add_.Tensor", "aten.mul_.Tensor"]


def test_inputs_are_not() -> None:
    assert _targets(lambda x: x.add(1), X) == ["aten.add.Tensor"]


def test_operand_that_is_needed_later_is_not() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return y.sin() * y

    assert _targets(run, X)[:2] == ["aten.exp.default", "aten.sin.default"]


def test_operand_with_a_living_view_is_not() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        view = y.t()
        return y.sin().matmul(view)

    assert "aten.sin.default" in _targets(run, X)


def test_operand_whose_view_is_another_operand_is_not() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return torch.ops.aten.add.Tensor(y, y.t())

    assert "aten.add.Tensor" in _targets(run, X)


def test_returned_operand_is_not() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.add(1)

    assert "aten.add.Tensor" in _targets(run, X)


def test_what_was_written_over_counts_as_its_new_value() -> None:
    """The second result lives in the first's storage, which must then not be taken while it is needed."""

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.exp().add(1)
        return y.sin() + y

    assert _targets(run, X)[2] == "aten.sin.default"


def test_dtype_and_shape_changes_are_not() -> None:
    assert "aten.lt.Scalar" in _targets(lambda x: x.exp().lt(0.5), X)
    assert "aten.add.Tensor" in _targets(lambda x: x.sum(0, keepdim=True).add(x), X)
    assert "aten.add.Tensor" in _targets(lambda x: x.exp()[:1].expand(4, 4).add(1), X)


def test_partial_writes() -> None:
    index = torch.tensor([0, 2])
    assert "aten.index_put_.default" in _targets(
        lambda x, i: aten.index_put.default(torch.zeros_like(x), [i], x[i], True), X, index
    )


def test_graph_is_rewritten_in_place() -> None:
    graph = fx.Graph()
    graph.output(())
    assert reinplace(graph) is graph


def test_any_operand_of_a_pointwise_operation_may_be_written_over() -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept, dead = x.exp(), x.sin()
        return kept, kept * dead

    assert "aten.mul.out" in _targets(run, X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(3,), (5, 7), (2, 3, 129), (4, 2048), (0, 4), (1, 1)])
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "softmax_backward", "log_softmax_backward"])
def test_row_by_row_operations_write_over_their_operand_bit_for_bit(
    function: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fresh = x.exp()
        if function == "softmax":
            return aten._softmax(fresh, -1, False)
        if function == "log_softmax":
            return aten._log_softmax(fresh, len(shape) - 1, False)
        if function == "softmax_backward":
            return aten._softmax_backward_data(fresh, y, -1, dtype)
        return aten._log_softmax_backward_data(fresh, y, -1, dtype)

    x, y = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype).softmax(-1)
    assert _targets(run, x, y)[-1].endswith("out")


def test_across_rows_it_is_not() -> None:
    assert _targets(lambda x: aten._softmax(x.exp(), 0, False), X)[-1] == "aten._softmax.default"


def test_copies_of_a_node_are_told_apart() -> None:
    """A copy carries its original's values, so storages are followed by node."""
    with FakeTensorMode() as mode:
        module = make_fx(lambda x: (x.exp().sin(), x.exp()))(mode.from_tensor(X))
    first, _, second = [node for node in module.graph.nodes if node.op == "call_function"]
    second.meta["val"] = first.meta["val"]
    reinplace(module.graph)
    assert [str(node.target) for node in module.graph.nodes if node.op == "call_function"][1] == "aten.sin_.default"


def test_operands_that_differ_in_dimensions_of_one_element_are_not() -> None:
    """Which strides the kernel gives these dimensions is not certain, and batch norm rounds by them."""
    plain = torch.randn(2, 5, 1, 1)
    turned = torch.randn(10).as_strided((2, 5, 1, 1), (5, 1, 5, 5))
    assert "aten.add.Tensor" in _targets(lambda x, y: x.exp() + y.exp(), plain, turned)
    assert "aten.add_.Tensor" in _targets(lambda x, y: x.exp() + y.exp(), plain, plain)


def test_complex_operands_are_not() -> None:
    values = torch.randn(4, 4, dtype=torch.complex64)
    assert _targets(lambda x: x.sin() * x.cos(), values)[-1] == "aten.mul.Tensor"


def test_as_text_a_dead_operand_is_written_over() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    mul: float32[4, 8] = aten.mul.Tensor(tanh, 2.0)
    return (mul,), ()
"""
    expecttest.assert_expected_inline(
        graph_text(reinplace(joint_of(before).graph)),
        """\
def graph(
    x: float32[4, 8],
):
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh_.default(exp)
    mul: float32[4, 8] = aten.mul_.Tensor(tanh, 2.0)
    return (mul,)
""",
    )


def test_as_text_what_is_read_later_is_not() -> None:
    before = """\
def joint(
    x: float32[4, 8],
):
    # captured
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    mul: float32[4, 8] = aten.mul.Tensor(tanh, exp)
    return (mul, exp), ()
"""
    expecttest.assert_expected_inline(
        graph_text(reinplace(joint_of(before).graph)),
        """\
def graph(
    x: float32[4, 8],
):
    exp: float32[4, 8] = aten.exp.default(x)
    tanh: float32[4, 8] = aten.tanh.default(exp)
    mul: float32[4, 8] = aten.mul_.Tensor(tanh, exp)
    return (mul, exp)
""",
    )
