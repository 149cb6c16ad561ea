from __future__ import annotations

from roundpipe_fx.analysis.fusion import dropped_operands, is_fusible, is_in_kernel, is_virtual
from roundpipe_fx.ir.joint_graph import Phase
from tests.graph_text import joint_of

GRAPH = """\
def joint(
    x: float32[8, 4],
    w: float32[4, 4],
    z: complex64[8, 4],
    tangents_1: float32[8, 4],
):
    # forward, stage 0, segment 0
    tanh: float32[8, 4] = aten.tanh.default(x)
    sum_1: float32[8, 1] = aten.sum.dim_IntList(tanh, [1], True)
    exp: float32[8, 4] = aten.exp.default(x)
    mm: float32[8, 4] = aten.mm.default(exp, w)
    view: float32[4, 8] = aten.view.default(mm, [4, 8])
    mul: complex64[8, 4] = aten.mul.Tensor(z, z)
    _to_copy: int64[8, 4] = aten._to_copy.default(tanh, dtype=torch.int64)
    gt: bool[8, 4] = aten.gt.Scalar(tanh, 0)
    bernoulli: float32[8, 4] = aten.bernoulli.default(tanh)
    native_dropout: (float32[8, 4], bool[8, 4]) = aten.native_dropout.default(x, 0.5, True)
    getitem: float32[8, 4] = operator.getitem(native_dropout, 0)
    getitem_1: bool[8, 4] = operator.getitem(native_dropout, 1)
    # backward, stage 0, segment 0
    mm_1: float32[8, 4] = aten.mm.default(tanh, w)
    return (sum_1, view, mul, _to_copy, gt, bernoulli, getitem, getitem_1), (mm_1,)
"""


def test_pointwise_operations_are_fusible() -> None:
    """Not what draws numbers, complex ones, and indices that another rounding would change."""
    nodes = [*joint_of(GRAPH).computed()]
    assert {node.name for node in nodes if is_fusible(node)} == {"tanh", "exp", "gt", "getitem"}
    assert {node.name for node in nodes if is_in_kernel(node)} == {"tanh", "exp", "gt", "sum_1"}


def test_a_value_is_virtual_where_only_kernels_read_it() -> None:
    nodes = {node.name: node for node in joint_of(GRAPH).computed()}
    assert not is_virtual(nodes["tanh"], Phase.FORWARD)  # to integers
    assert not is_virtual(nodes["tanh"], Phase.BACKWARD)
    assert not is_virtual(nodes["exp"], Phase.FORWARD)
    assert is_virtual(nodes["exp"], Phase.BACKWARD)


def test_what_a_later_kernel_or_stage_reads_is_not_virtual() -> None:
    """The end of a residual connection waits for a product; a product of other operands delays nothing."""
    graph = """\
def joint(
    x: float32[8, 4],
    y: float32[8, 4],
    w: float32[4, 4],
):
    # forward, stage 0, segment 0
    tanh: float32[8, 4] = aten.tanh.default(x)
    exp: float32[8, 4] = aten.exp.default(tanh)
    mm: float32[8, 4] = aten.mm.default(exp, w)
    view: float32[8, 4] = aten.view.default(mm, [8, 4])
    add: float32[8, 4] = aten.add.Tensor(tanh, view)
    sin: float32[8, 4] = aten.sin.default(x)
    mm_1: float32[8, 4] = aten.mm.default(y, w)
    add_1: float32[8, 4] = aten.add.Tensor(sin, mm_1)
    cos: float32[8, 4] = aten.cos.default(x)
    # forward, stage 1, segment 1
    add_2: float32[8, 4] = aten.add.Tensor(cos, mm_1)
    return (add, add_1, add_2), ()
"""
    nodes = {node.name: node for node in joint_of(graph).computed()}
    virtual = [name for name in ("tanh", "sin", "cos") if is_virtual(nodes[name], Phase.FORWARD)]
    assert virtual == ["sin"]


def test_a_costly_value_that_loops_read_again_is_written_on_a_cpu() -> None:
    """The first loop writes it; one that a single loop reads, or that is cheap, is computed again."""
    graph = """\
def joint(
    x: float32[8, 4],
    y: float32[8, 4],
):
    # forward, stage 0, segment 0
    tanh: float32[8, 4] = aten.tanh.default(x)
    mul: float32[8, 4] = aten.mul.Tensor(tanh, 30.0)
    view: float32[8, 4] = aten.view.default(mul, [8, 4])
    _log_softmax: float32[8, 4] = aten._log_softmax.default(view, 1, False)
    exp: float32[8, 4] = aten.exp.default(y)
    amax: float32[8, 1] = aten.amax.default(exp, [1], True)
    sub: float32[8, 4] = aten.sub.Tensor(exp, amax)
    relu: float32[8, 4] = aten.relu.default(y)
    amax_1: float32[8, 1] = aten.amax.default(relu, [1], True)
    sub_1: float32[8, 4] = aten.sub.Tensor(relu, amax_1)
    sigmoid: float32[8, 4] = aten.sigmoid.default(y)
    sum_1: float32[8, 1] = aten.sum.dim_IntList(sigmoid, [1], True)
    return (_log_softmax, sub, sub_1, sum_1), ()
"""
    nodes = {node.name: node for node in joint_of(graph).computed()}
    names = ("tanh", "mul", "exp", "relu", "sigmoid")
    assert [name for name in names if is_virtual(nodes[name], Phase.FORWARD)] == ["relu", "sigmoid"]


def test_a_dropout_is_its_operands() -> None:
    nodes = {node.name: node for node in joint_of(GRAPH).computed()}
    dropped = dropped_operands(nodes["getitem"])
    assert dropped is not None and [str(item) for item in dropped] == ["x", "getitem_1", "2.0"]
    assert dropped_operands(nodes["getitem_1"]) is None
