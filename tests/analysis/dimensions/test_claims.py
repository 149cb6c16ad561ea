"""What is claimed, and what is not: the descriptions of common calls, and of calls that are not described."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from roundpipe_fx.analysis.dimensions import arguments_on_tile, dimensions_of, operand_nodes
from tests.analysis.dimensions.calls import RealCall, call, node_of, text
from tests.analysis.dimensions.sample_sizes import Sizes, inner, mask, real, whole
from tests.analysis.dimensions.samples import SAMPLES
from tests.analysis.dimensions.shape_samples import INDEXING, PARTS, VIEWS

aten = torch.ops.aten


def described(target: Any, *args: Any, **kwargs: Any) -> str:
    return text(dimensions_of(node_of(target, *args, **kwargs)))


TOTAL = torch.ones((), dtype=torch.float64)

CLAIMS = [
    (aten.add.Tensor, call(real(4, 5), real(5)), "a b, b -> a b"),
    (aten.add.Tensor, call(real(4, 5), real(4, 1)), "a b, a 1 -> a b"),
    (aten.mm.default, call(real(2, 3), real(3, 4)), "a b, b c -> a c"),
    (aten.addmm.default, call(real(4), real(2, 3), real(3, 4)), "a, b C, C a -> b a"),
    (aten.bmm.default, call(real(5, 2, 3), real(5, 3, 4)), "a b c, a c d -> a b d"),
    (aten.view.default, call(real(6, 5), [2, 3, 5]), "ab c -> a b c"),
    (aten.view.default, call(real(2, 3, 5), [6, 5]), "a b c -> ab c"),
    (aten.view.default, call(real(2, 6, 5), [4, 3, 5]), "a bc d -> ab c d"),
    (aten.view.default, call(real(5, 4, 6), [5, 6, 4]), "a B C -> a D E"),
    (aten.view.default, call(real(5, 1, 6), [1, 5, 6]), "a 1 b -> 1 a b"),
    (aten.expand.default, call(real(4, 1), [3, 4, 5]), "a 1 -> b a c"),
    (aten.repeat.default, call(real(4, 3), [2, 1]), "a b -> ca b"),
    (aten.squeeze.dim, call(real(4, 5), 0), "A b -> A b"),
    (aten.squeeze.default, call(real(4, 1, 5)), "A 1 B -> A B"),
    (aten.slice.Tensor, call(real(4, 5), 1, 1, 3), "a B -> a C"),
    (aten.slice.Tensor, call(real(4, 5), 1, 0, 1 << 62), "a b -> a b"),
    (aten.cat.default, call([real(4, 5), real(4, 3)], 1), "a B, a C -> a D"),
    (aten.split.Tensor, call(real(4, 5), 3, 1), "a B -> a C, a D"),
    (aten.flip.default, call(real(4, 5), [1]), "a B -> a B"),
    (aten._softmax.default, call(real(4, 5), 1, False), "a B -> a B"),
    (aten._log_softmax.default, call(real(4, 5), 1, False), "a B -> a B"),
    (aten.cumsum.default, call(real(4, 5), 0), "A b -> A b"),
    (aten.sort.default, call(real(4, 5)), "a B -> a B, a B"),
    (aten.topk.default, call(real(4, 5), 2), "a B -> a C, a C"),
    (aten.sum.dim_IntList, call(real(4, 5), [0]), "a b -> b"),
    (aten.sum.default, call(real(4, 5)), "a b -> ()"),
    (aten.mean.dim, call(real(4, 5), [1], True), "a B -> a 1"),
    (aten.amax.default, call(real(4, 5), [1]), "a B -> a"),
    (aten.argmax.default, call(real(4, 5), 1), "a B -> a"),
    (aten.embedding.default, call(real(7, 3), whole(7, 4, 5)), "A b, c d -> c d b"),
    (aten.embedding_dense_backward.default, call(real(4, 3), whole(7, 4), 7, -1, False), "a b, a -> C b"),
    (aten.embedding_dense_backward.default, call(real(4, 3), whole(7, 4), 7, -1, True), "A b, A -> C b"),
    (aten.gather.default, call(real(4, 5), 1, whole(5, 4, 2)), "a B, a c -> a c"),
    (aten.scatter_add.default, call(real(4, 5), 1, whole(5, 4, 2), real(4, 2)), "a B, a C, a C -> a B"),
    (aten.index_put.default, call(real(4, 5), [whole(4, 3)], real(3, 5)), "A b, C, C b -> A b"),
    (aten.nll_loss_forward.default, call(real(4, 5), whole(5, 4), None, 0, -100), "a B, a -> a, ()"),
    (aten.nll_loss_forward.default, call(real(4, 5), whole(5, 4), inner(5), 2, -100), "a B, a, B -> (), ()"),
    (aten.nll_loss_forward.default, call(real(4, 5), whole(5, 4), None, 1, -100), "A B, A -> (), ()"),
    (
        aten.nll_loss_backward.default,
        call(real(), real(4, 5), whole(5, 4), None, 1, -100, TOTAL),
        "(), a B, a, () -> a B",
    ),
    (aten.mse_loss.default, call(real(4, 5), real(4, 5), 2), "a b, a b -> ()"),
    (aten.mse_loss.default, call(real(4, 5), real(4, 5)), "A B, A B -> ()"),
    (aten.mse_loss_backward.default, call(real(), real(4, 5), real(4, 5), 1), "(), A B, A B -> A B"),
    (aten.native_layer_norm.default, call(real(4, 5), [5], real(5), None, 1e-5), "a B, B -> a B, a 1, a 1"),
    (
        aten.native_layer_norm_backward.default,
        call(real(4, 5), real(4, 5), [5], real(4, 1), real(4, 1), real(5), real(5), [True, True, True]),
        "a B, a B, a 1, a 1, B, B -> a B, B, B",
    ),
    (
        aten.convolution.default,
        call(real(2, 3, 8, 8), real(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        "a b C D, e b F G -> a e H I",
    ),
    (
        aten.convolution.default,
        call(real(2, 4, 8, 8), real(4, 2, 3, 3), real(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
        "a B C D, E F G H, I -> a I J K",
    ),
    (aten.full.default, call([4, 5], 1.0), "-> a b"),
    (aten.arange.default, call(4), "-> A"),
    (aten.new_zeros.default, call(real(4, 5), [4, 5]), "a b -> a b"),
    (aten.new_zeros.default, call(real(4, 5), [7, 5]), "A b -> c b"),
]


def _name(value: Any) -> str | None:
    return None if isinstance(value, RealCall) else str(value)


@pytest.mark.parametrize(("target", "arguments", "expected"), CLAIMS, ids=_name)
def test_descriptions(target: Any, arguments: Any, expected: str) -> None:
    assert described(target, *arguments.args, **arguments.kwargs) == expected


UNKNOWN = [
    (aten.as_strided.default, call(real(4, 5), [2, 2], [1, 1])),
    (aten.native_dropout.default, call(real(4, 5), 0.1, True)),
    (aten.bernoulli.default, call(inner(4, 5))),
    (aten.add_.Tensor, call(real(4, 5), real(4, 5))),
    (aten.index.Tensor, call(real(4, 5), [mask(4)])),
    (aten.equal.default, call(real(4), real(4))),
    (aten.bucketize.Tensor, call(real(4), real(3))),
    (aten.dot.default, call(torch.complex(real(4), real(4)), torch.complex(real(4), real(4)))),
    (aten.cat.default, call([real(0), real(4, 5)])),
]


@pytest.mark.parametrize(("target", "arguments"), UNKNOWN, ids=_name)
def test_others_are_unknown(target: Any, arguments: Any) -> None:
    graph = fx.Graph()

    def as_input(value: Any) -> Any:
        node = graph.placeholder("operand")
        node.meta["val"] = value
        return node

    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, as_input, (arguments.args, arguments.kwargs))
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*arguments.args, **arguments.kwargs)
    assert dimensions_of(node) is None


def test_attention_with_dropout_is_unknown() -> None:
    target, heads = aten._scaled_dot_product_flash_attention_for_cpu.default, real(2, 3, 5, 8)
    assert described(target, heads, heads, heads) == "a b c D, a b E D, a b E F -> a b c F, a b c"
    assert described(target, heads, heads, heads, 0.0, True) == "a b C D, a b E D, a b E F -> a b C F, a b C"
    node = node_of(target, heads, heads, heads)
    node.args = (*node.args, 0.1)
    assert dimensions_of(node) is None


def test_tuple_items_and_inputs_are_not_described() -> None:
    node = node_of(aten.split.Tensor, real(4, 5), 2)
    assert dimensions_of(node.args[0]) is None  # type: ignore[arg-type]
    assert operand_nodes(node.args[0]) == []  # type: ignore[arg-type]


def test_operands_are_in_the_order_of_the_schema_and_repeated() -> None:
    node = node_of(aten.index_put.default, real(4, 5), [None, whole(5, 3)], real(4, 3))
    source, index, values = [item for item in node.graph.nodes if item.op == "placeholder"]
    assert operand_nodes(node) == [source, index, values]
    same = node.graph.call_function(aten.cat.default, ([source, source],))
    assert operand_nodes(same) == [source, source]


def test_sizes_on_a_tile_may_be_nodes() -> None:
    node = node_of(aten.view.default, real(6, 5), [2, 3, 5])
    dimensions = dimensions_of(node)
    assert dimensions is not None
    rows, columns = dimensions.operands[0][0]
    with node.graph.inserting_before(node):
        size = node.graph.placeholder("size")
        args, kwargs = arguments_on_tile(node, dimensions, {rows: size})
    assert (args, kwargs) == ((node.args[0], [size, 3, 5]), {})
    node = node_of(aten.view.default, real(2, 3, 5), [6, 5])
    dimensions = dimensions_of(node)
    assert dimensions is not None
    with node.graph.inserting_before(node):
        size = node.graph.placeholder("size")
        args, kwargs = arguments_on_tile(node, dimensions, {rows: size})
    product = args[1][0]
    assert (product.args, args[1][1]) == ((size, 3), 5)
    assert arguments_on_tile(node, dimensions, {columns: 1})[0][1] == [2, 5]


def test_arguments_without_a_divided_dimension_are_those_of_the_node() -> None:
    node = node_of(aten.native_group_norm.default, real(4, 6, 3, 2), None, None, 4, 6, 6, 2, 1e-5)
    dimensions = dimensions_of(node)
    assert dimensions is not None
    assert arguments_on_tile(node, dimensions, {}) == (node.args, node.kwargs)
    assert arguments_on_tile(node, dimensions, {dimensions.operands[0][0][0]: 2})[0][3] == 2


DIFFERENT_SYMBOLS = [*VIEWS, *PARTS, *INDEXING]
ONLY_NUMBERS = {aten.addbmm.default, aten.hardshrink_backward.default, aten.softshrink_backward.default}
"""Have no fake kernel for symbolic sizes; of a few others some forms have none."""


@pytest.mark.parametrize(
    ("operator", "dynamic"),
    [
        *((operator, DimDynamic.DUCK) for operator in SAMPLES),
        *((operator, DimDynamic.DYNAMIC) for operator in DIFFERENT_SYMBOLS),
    ],
    ids=str,
)
@pytest.mark.quick_every(9)
def test_symbolic_sizes_add_no_guards_and_claim_no_more(operator: Any, dynamic: DimDynamic) -> None:
    checked = 0
    for sample in SAMPLES[operator]:
        torch.manual_seed(0)
        made = sample(Sizes(8, 7, 5, 9))
        try:
            node = node_of(operator, *made.args, dynamic=dynamic, **made.kwargs)
        except (RuntimeError, NotImplementedError):
            continue
        checked += 1
        static = dimensions_of(node_of(operator, *made.args, **made.kwargs))
        env = next(n for n in node.graph.nodes).meta["val"].fake_mode.shape_env if operand_nodes(node) else None
        before = [str(guard.expr) for guard in env.guards] if env else []
        symbolic = dimensions_of(node)
        if env:
            assert [str(guard.expr) for guard in env.guards] == before
        if symbolic is not None:
            assert static is not None
            pairs = zip((*symbolic.operands, *symbolic.results), (*static.operands, *static.results), strict=True)
            for dims, others in pairs:
                for dim, other in zip(dims, others, strict=True):
                    if other and static.mixed.issuperset(other):
                        assert symbolic.mixed.issuperset(dim)
    assert (checked == 0) == (operator in ONLY_NUMBERS)


def test_views_with_symbolic_sizes() -> None:
    node = node_of(aten.view.default, real(8, 7, 5), [56, 5], dynamic=DimDynamic.DYNAMIC)
    batch, length, width = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    node.meta["val"] = node.args[0].meta["val"].new_empty(batch * length, width)  # type: ignore[union-attr]
    assert text(dimensions_of(node)) == "a b c -> ab c"
    node.meta["val"] = node.args[0].meta["val"].new_empty(batch * length * width)  # type: ignore[union-attr]
    assert text(dimensions_of(node)) == "a b c -> abc"
    node.meta["val"] = node.args[0].meta["val"].new_empty(batch, width, length)  # type: ignore[union-attr]
    assert text(dimensions_of(node)) == "a B C -> a D E"
