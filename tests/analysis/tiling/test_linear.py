"""What is held proportional is: f(a g) = a f(g)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from roundpipe_fx.analysis.tiling import linear
from roundpipe_fx.analysis.tiling.linear import find_proportional
from tests.analysis.dimensions.calls import RealCall, call, node_of
from tests.analysis.dimensions.sample_sizes import Sizes, mask, real
from tests.analysis.dimensions.samples import DECOMPOSED, SAMPLES

aten = torch.ops.aten
SIZES = Sizes(4, 3, 5, 2)

LISTED = linear._IN_FIRST | linear._PRODUCTS | linear._SUMS | linear._CHOICES | linear._SCATTERS

MORE: dict[Any, list[RealCall]] = {
    aten.where.self: [call(mask(4, 3), real(4, 3), torch.zeros(()).double())],
    aten.scatter_add.default: [call(torch.zeros(4, 3).double(), 1, torch.tensor([[0, 0]] * 4), real(4, 2))],
    aten.sub.Tensor: [call(real(4, 3), real(4, 3)), call(real(4, 3), 2.0)],
    aten.add.Tensor: [call(real(4, 3), real(4, 3), alpha=2), call(real(4, 3), 2.0)],
    aten.mul.Tensor: [call(real(4, 3), real(4, 3)), call(real(4, 3), 2.0), call(real(4, 3), real())],
    aten.div.Tensor: [call(real(4, 3), real(4, 3)), call(real(4, 3), 2.0)],
    aten._to_copy.default: [call(real(4, 3), dtype=torch.int64), call(real(4, 3), dtype=torch.bool)],
    aten.neg.default: [call(real(4, 3))],
    aten.tanh_backward.default: [call(real(4, 3), real(4, 3))],
    aten.sigmoid_backward.default: [call(real(4, 3), real(4, 3))],
    aten.silu_backward.default: [call(real(4, 3), real(4, 3))],
    aten.threshold_backward.default: [call(real(4, 3), real(4, 3), 0.0)],
}


def _calls() -> list[tuple[Any, RealCall]]:
    torch.manual_seed(0)
    found = []
    for operator, samples in SAMPLES.items():
        if operator.overloadpacket in LISTED or operator.overloadpacket in (aten.exp, aten.tanh, aten.round, aten.abs):
            found += [(operator, sample(SIZES)) for sample in samples]
    return found + [(operator, own) for operator, calls in MORE.items() for own in calls]


def _claims(target: Any, made: RealCall) -> list[tuple[int, ...]]:
    """The sets of inputs of a call such that it is held proportional in them together."""
    node = node_of(target, *made.args, **made.kwargs)
    inputs = node.graph.find_nodes(op="placeholder")
    graph = node.graph
    found = []
    floats = [i for i, one in enumerate(inputs) if one.meta["val"].is_floating_point()]
    for together in [(i,) for i in floats] + [(i, j) for i in floats for j in floats if i < j]:
        with graph.inserting_before(inputs[0]):
            scalar = graph.placeholder("scalar")
        makers = []
        for i in together:
            with graph.inserting_before(node):
                maker = graph.call_function(aten.neg.default, (inputs[i],))
            maker.meta["val"] = inputs[i].meta["val"]
            makers.append(maker)
            inputs[i].replace_all_uses_with(maker, delete_user_cb=lambda user: user is node)
        claimed = proportional_in(node, makers, scalar)
        if claimed:
            found.append(together)
        for i, maker in zip(together, makers, strict=True):
            maker.replace_all_uses_with(inputs[i])
            graph.erase_node(maker)
        graph.erase_node(scalar)
    return found


def proportional_in(node: fx.Node, makers: list[fx.Node], scalar: fx.Node) -> bool:
    """Whether a node is held proportional if some of its inputs are."""
    kind = linear._kind(node, dict.fromkeys([scalar, *makers], True))
    return kind is True


@pytest.mark.parametrize(("target", "made"), _calls(), ids=lambda value: str(value)[:40] if callable(value) else "")
@pytest.mark.parametrize("factor", [-0.37, 3.0, 1e-3])
@pytest.mark.quick_every(2)
def test_what_is_claimed_holds(target: Any, made: RealCall, factor: float) -> None:
    run = DECOMPOSED.get(target, target)
    tensors = [leaf for leaf in tree_leaves((made.args, made.kwargs)) if isinstance(leaf, torch.Tensor)]
    before = [leaf for leaf in tree_leaves(run(*made.args, **made.kwargs)) if isinstance(leaf, torch.Tensor)]
    for together in _claims(target, made):
        chosen = {id(tensors[i]) for i in together}
        args, kwargs = torch.utils._pytree.tree_map(
            lambda leaf: leaf * factor if id(leaf) in chosen else leaf,  # noqa: B023
            (made.args, made.kwargs),
        )
        after = [leaf for leaf in tree_leaves(run(*args, **kwargs)) if isinstance(leaf, torch.Tensor)]
        for one, other in zip(after, before, strict=True):
            assert torch.allclose(one, other * factor, rtol=1e-6 if one.dtype is torch.float32 else 1e-12, atol=1e-9)


@pytest.mark.parametrize(
    ("target", "made"),
    [
        (aten.exp.default, call(real(4, 3))),
        (aten.round.default, call(real(4, 3))),
        (aten.div.Tensor_mode, call(real(4, 3), real(3), rounding_mode="floor")),
        (aten._to_copy.default, call(real(4, 3), dtype=torch.int64)),
        (aten.add.Tensor, call(real(4, 3), 1.0)),
        (aten.masked_fill.Scalar, call(real(4, 3), mask(4, 3), 1.5)),
        (aten.pow.Tensor_Scalar, call(real(4, 3), 2)),
    ],
)
def test_what_is_not_proportional_is_not_claimed(target: Any, made: RealCall) -> None:
    assert (0,) not in _claims(target, made)


def test_each_listed_gradient_is_tried() -> None:
    tried = {operator.overloadpacket for operator, _ in _calls()}
    missing = {str(packet) for packet in LISTED - tried}
    assert missing <= {"aten.where", "aten.nll_loss2d_backward"}, missing


def test_values_that_depend_in_two_ways_are_unknown() -> None:
    graph = fx.Graph()
    scalar = graph.placeholder("scalar")
    square = graph.call_function(aten.mul.Tensor, (scalar, scalar))
    assert find_proportional([square], [scalar]) is None
