from __future__ import annotations

import expecttest
import pytest
import torch
import torch.distributed._functional_collectives  # registers the operators
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import roundpipe_fx
from roundpipe_fx.analysis.cost.roofline import DEVICES
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.boolean_indexing import expand_boolean_indexing
from roundpipe_fx.passes.hoist_host_syncs import hoist_host_syncs
from tests.capturing import capture_joint
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step
from tests.golden_models import MixtureOfExperts
from tests.graph_text import after

aten = torch.ops.aten


def _hoisted(run, *inputs: torch.Tensor, registered=()) -> tuple[JointGraph, dict[str, str]]:
    joint = annotate(expand_boolean_indexing(capture_joint(run, *inputs)), DEVICES["cpu"])
    hoist_host_syncs(joint, registered)
    return joint, {str(n.target): n.meta[Mark.MUST_SAVE] for n in joint.computed() if Mark.MUST_SAVE in n.meta}


def _data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_mask_indexing_becomes_one_nonzero() -> None:
    """Selecting and writing back by one mask, and both backwards, share the host sync."""

    def run(x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        y = torch.zeros_like(x)
        y[mask] = x[mask] * 2
        return y.sum()

    joint, hoisted = _hoisted(run, _data(3, 4))
    host_syncs = [n for n in joint.computed() if n.target is aten.nonzero.default]
    assert len(host_syncs) == 1 and host_syncs[0].meta[Mark.PHASE] is Phase.FORWARD
    assert hoisted["aten.nonzero.default"] == "its size depends on data"
    for node in joint.computed():
        if node.target in (aten.index.Tensor, aten.index_put.default):
            assert all(index.meta["val"].dtype is torch.int64 for index in node.args[1] if index is not None)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x[x > 0].sum(),
        lambda x: (x[:, x[0] > 0] * 3).sum(),
        lambda x: x.masked_select(x > 0).square().sum(),
        lambda x: x.masked_select(x[0] > 0).square().sum(),
        lambda x: torch.zeros(4, 4).masked_scatter(x[:4] > 0, x * 2).square().sum() + x[x > 0].sum(),
        lambda x: (x.index_put((x > 0.5,), torch.tensor(3.0)) * x).sum(),
        lambda x: (x * x.detach().abs().sum().long().item()).sum(),
        lambda x: (x[x.sum(1).nonzero().squeeze(1)] * 2).sum(),
        lambda x: (torch.unique(x.detach().round()).sum() * x).sum(),
        lambda x: x.repeat_interleave(x.detach().abs().long()[:, 0] + 1, dim=0).square().sum(),
    ],
    ids=["mask", "mask-dim1", "select", "select-broadcast", "scatter", "put", "item", "nonzero", "unique", "repeat"],
)
@pytest.mark.quick_every(3)
def test_bits_and_no_question_in_the_backward(run) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return run(torch.tanh(self.second(torch.tanh(self.first(x)))))

    model, batch = Model(), {"x": torch.randn(6, 4)}
    reference = aot_eager_step(model, batch)
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        step, compiled = compiled_step(model, batch, stages=2, recompute=recompute)
        assert_bitwise(step, reference)
        with roundpipe_fx.count_host_syncs() as forward_asked:
            loss = compiled(**batch)
        with roundpipe_fx.count_host_syncs() as syncs:
            loss.backward()
        assert forward_asked.total >= 1
        assert syncs.total == 0, syncs.by_operator


@pytest.mark.parametrize("mask", [lambda x: x > 0, lambda x: x[:, :1] > 0], ids=["mask", "broadcast"])
def test_scattering_asks_nothing_in_the_backward_whatever_the_batch_size(mask) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(self.first(x))
            return torch.zeros_like(y).masked_scatter(mask(y), self.second(y)).square().sum()

    model = Model()
    compiled = roundpipe_fx.compile(model, recompute="full", dynamic=True)
    for rows in (6, 9, 4):
        batch = {"x": torch.randn(rows, 4)}
        reference = aot_eager_step(model, batch)
        model.zero_grad()
        loss = compiled(**batch)
        with roundpipe_fx.count_host_syncs() as syncs:
            loss.backward()
        assert syncs.total == 0, syncs.by_operator
        assert_bitwise(train_step(compiled, model, batch), reference)
    assert len(compiled.plans) == 1


@pytest.mark.long
def test_experts_ask_once_where_checkpoint_asks_again() -> None:
    from torch.utils.checkpoint import checkpoint

    model = MixtureOfExperts(depth=3, experts=4)
    batch = {"x": torch.randn(16, 8)}
    _, compiled = compiled_step(model, batch, stages=3, recompute="full")
    loss = compiled(**batch)
    with roundpipe_fx.count_host_syncs() as ours:
        loss.backward()
    x = batch["x"]
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False)
    with roundpipe_fx.count_host_syncs() as theirs:
        x.square().mean().backward()
    assert ours.total == 0
    assert theirs.by_operator["aten.nonzero"] == 12 and theirs.by_operator["aten.topk"] == 3


def test_routing_is_a_decision_and_pooling_is_not() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.max_pool2d(x, 2)
        weights, chosen = pooled.flatten(1).topk(2)
        return (weights * pooled.flatten(1).gather(1, chosen)).sum()

    _, hoisted = _hoisted(run, _data(2, 1, 4, 4))
    assert hoisted == {"aten.topk.default": "decides a route"}


def test_where_a_gradient_goes_is_decided_once() -> None:
    """Of values alone the indices are read by the backward only; chosen again they might differ from the forward's."""
    _, hoisted = _hoisted(lambda x: x.max(dim=1).values.sum(), _data(3, 4))
    assert hoisted == {"aten.max.dim": "decides a route"}


def test_copies_to_the_host_are_hoisted() -> None:
    """On fake CUDA values, so without a device: a copy to the host, not one back and not one within."""
    mode = FakeTensorMode()

    def fake(device: str) -> torch.Tensor:
        return FakeTensor(mode, torch.empty(4, device="meta"), torch.device(device))

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = fake("cuda")
    last = x
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float32), ("cuda", torch.float32)):
        last = graph.call_function(aten._to_copy.default, (last,), {"device": torch.device(device), "dtype": dtype})
        last.meta.update({"val": fake(device), Mark.PHASE: Phase.FORWARD})
    graph.output((last,))
    joint = hoist_host_syncs(JointGraph(module=fx.GraphModule(nn.Module(), graph), num_forward_outputs=1))
    hoisted = [node.meta.get(Mark.MUST_SAVE) for node in joint.computed()]
    assert hoisted == [None, "copied from the device to the host", None]


def test_a_cast_that_routes_is_a_decision() -> None:
    _, hoisted = _hoisted(lambda x: (x * x[:, 0].abs().long().clamp(0, 2)[:, None].float()).sum(), _data(3, 4))
    assert not hoisted  # a number that only scales
    _, hoisted = _hoisted(lambda x: x[x[:, 0].abs().long().clamp(0, 2)].sum(), _data(3, 4))
    assert hoisted == {"aten._to_copy.default": "decides a route"}


@torch.library.custom_op("roundpipe_fx_tests::slow_scale", mutates_args=())
def slow_scale(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.abs().max().item())


@slow_scale.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


slow_scale.register_autograd(lambda ctx, g: g * 2)


def test_registered_operators_run_once() -> None:
    from roundpipe_fx.analysis import host_sync

    model = nn.Sequential(nn.Linear(4, 4), _Scale(), nn.Linear(4, 4))

    def backward_calls() -> int:
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, stages=1, recompute="full")
        loss = compiled(torch.randn(2, 4)).square().sum()
        with roundpipe_fx.count_host_syncs() as syncs:
            loss.backward()
        return syncs.by_operator["roundpipe_fx_tests.slow_scale"]

    before = set(host_sync._registered)
    try:
        plain = train_step(lambda x: model(x).square().sum(), model, {"x": torch.ones(2, 4)})
        roundpipe_fx.register_sync_op(slow_scale)
        assert backward_calls() == 0
        compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
        assert_bitwise(train_step(lambda x: compiled(x).square().sum(), model, {"x": torch.ones(2, 4)}), plain)
        assert any("registered" in value.reason for stage in compiled.plan.stages for value in stage.hoisted)
    finally:
        host_sync._registered.clear()
        host_sync._registered.update(before)
    with pytest.raises(TypeError, match="takes an operator"):
        roundpipe_fx.register_sync_op(lambda x: x)


class _Scale(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return slow_scale(x)


def test_as_text_what_decides_a_route_runs_once() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 2],
):
    # forward
    topk: (float32[4, 2], int64[4, 2]) = aten.topk.default(x, 2)
    getitem: float32[4, 2] = topk[0]
    getitem_1: int64[4, 2] = topk[1]
    exp: float32[4, 2] = aten.exp.default(getitem)
    # backward
    mul: float32[4, 2] = aten.mul.Tensor(tangents_1, exp)
    zeros: float32[4, 8] = aten.new_zeros.default(mul, [4, 8])
    scatter: float32[4, 8] = aten.scatter.src(zeros, 1, getitem_1, mul)
    return (exp,), (scatter,)
"""
    made = after(hoist_host_syncs, before, name="hoist_host_syncs")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 2],
):
    # forward
    topk: (float32[4, 2], int64[4, 2]) = aten.topk.default(x, 2)  # must run once: decides a route
    getitem: float32[4, 2] = topk[0]
    getitem_1: int64[4, 2] = topk[1]
    exp: float32[4, 2] = aten.exp.default(getitem)
    # backward
    mul: float32[4, 2] = aten.mul.Tensor(tangents_1, exp)
    zeros: float32[4, 8] = aten.new_zeros.default(mul, [4, 8])
    scatter: float32[4, 8] = aten.scatter.src(zeros, 1, getitem_1, mul)
    return (exp,), (scatter,)
""",
    )


def test_as_text_a_registered_operator_runs_once() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    relu: float32[4, 8] = aten.relu.default(x)
    sin: float32[4, 8] = aten.sin.default(relu)
    # backward
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, relu)
    return (sin,), (mul,)
"""
    made = after(hoist_host_syncs, before, {torch.ops.aten.relu.default}, name="hoist_host_syncs")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    tangents_1: float32[4, 8],
):
    # forward
    relu: float32[4, 8] = aten.relu.default(x)  # must run once: registered by the user
    sin: float32[4, 8] = aten.sin.default(relu)
    # backward
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, relu)
    return (sin,), (mul,)
""",
    )


def test_as_text_collectives_of_the_forward_run_once() -> None:
    before = """\
def joint(
    x: float32[2, 8],
    tangents_1: float32[4, 8],
):
    # forward
    all_gather: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')
    wait_tensor: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather)
    sin: float32[4, 8] = aten.sin.default(wait_tensor)
    # backward
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, wait_tensor)
    reduce_scatter: float32[2, 8] = torch.ops._c10d_functional.reduce_scatter_tensor.default(mul, 'sum', 2, '0')
    wait_tensor_1: float32[2, 8] = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter)
    return (sin,), (wait_tensor_1,)
"""
    expecttest.assert_expected_inline(
        after(hoist_host_syncs, before, name="hoist_host_syncs"),
        """\
def joint(
    x: float32[2, 8],
    tangents_1: float32[4, 8],
):
    # forward
    all_gather: float32[4, 8] = torch.ops._c10d_functional.all_gather_into_tensor.default(x, 2, '0')  # must run once: communicates with other processes
    wait_tensor: float32[4, 8] = torch.ops._c10d_functional.wait_tensor.default(all_gather)  # must run once: communicates with other processes
    sin: float32[4, 8] = aten.sin.default(wait_tensor)
    # backward
    mul: float32[4, 8] = aten.mul.Tensor(tangents_1, wait_tensor)
    reduce_scatter: float32[2, 8] = torch.ops._c10d_functional.reduce_scatter_tensor.default(mul, 'sum', 2, '0')
    wait_tensor_1: float32[2, 8] = torch.ops._c10d_functional.wait_tensor.default(reduce_scatter)
    return (sin,), (wait_tensor_1,)
""",
    )
