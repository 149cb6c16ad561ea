"""Where regions end, and what they must not hold."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from roundpipe_fx.analysis.tiling import TileRegion, TileRegions
from tests.graph_text import joint_of


def regions(text: str) -> list[TileRegion]:
    return TileRegions(joint_of(text)).find_wide_regions(0)


def names(region: TileRegion) -> set[str]:
    return {node.name for node in region.members}


def places(region: TileRegion) -> Mapping[str, tuple[int, ...]]:
    return {node.name: rows for node, rows in region.where.items()}


def forward(*lines: str, inputs: str = "", result: str) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return (
        "def joint(\n"
        "    primals_1: float32[64, 4],\n"
        "    primals_2: float32[4, 128],  # parameter\n"
        "    primals_3: float32[128, 4],  # parameter\n"
        f"{inputs}"
        "    tangents_1: float32[64, 4],\n"
        "):\n"
        "    # forward\n"
        f"{body}"
        "    # backward\n"
        "    back: float32[64, 4] = aten.neg.default(tangents_1)\n"
        f"    return ({result},), (back, None, None{', None' * inputs.count('primals')})\n"
    )


UP = "mm: float32[64, 128] = aten.mm.default(primals_1, primals_2)"
TANH = "tanh: float32[64, 128] = aten.tanh.default(mm)"
DOWN = "mm_1: float32[64, 4] = aten.mm.default(tanh, primals_3)"


def test_from_one_narrow_value_to_another() -> None:
    (region,) = regions(forward(UP, TANH, DOWN, result="mm_1"))
    assert names(region) == {"mm", "tanh", "mm_1"}
    assert region.rows == 64
    assert places(region) == dict.fromkeys(["primals_1", "mm", "tanh", "mm_1"], (0,))


def test_a_wide_value_that_is_read_elsewhere_is_in_no_region() -> None:
    """It exists anyway: a median needs all of it at once."""
    median = "median: float32[] = aten.median.default(tanh)"
    sum_ = "add: float32[64, 4] = aten.add.Tensor(mm_1, median)"
    for region in regions(forward(UP, TANH, DOWN, median, sum_, result="add")):
        assert not {"mm", "tanh"} & names(region)


@pytest.mark.parametrize("first", ["sub", "sum_1"])
def test_no_operation_reads_a_sum_before_all_tiles_are_added(first: str) -> None:
    """A sum over rows that is taken off every row."""
    lines = [
        UP,
        TANH,
        "sum_1: float32[1, 128] = aten.sum.dim_IntList(tanh, [0], True)",
        f"sub: float32[64, 128] = aten.sub.Tensor({'mm' if first == 'sub' else 'tanh'}, sum_1)",
        "mm_1: float32[64, 4] = aten.mm.default(sub, primals_3)",
    ]
    for region in regions(forward(*lines, result="mm_1")):
        if "sub" in names(region) and "sum_1" in names(region):
            assert region.where[next(n for n in region.members if n.name == "sum_1")]


def test_what_one_operation_reads_whole_no_other_divides() -> None:
    """Rows of a value are picked by indices and added to the same value: from the result on, rows are its rows."""
    lines = [
        "mm: float32[64, 4] = aten.neg.default(primals_1)",
        "index: float32[64, 4] = aten.index.Tensor(mm, [primals_4])",
        "add: float32[64, 4] = aten.add.Tensor(mm, index)",
        "unsqueeze: float32[64, 4, 1] = aten.unsqueeze.default(add, 2)",
        "unsqueeze_1: float32[4, 128, 1] = aten.unsqueeze.default(primals_2, 2)",
        "expand: float32[64, 4, 64] = aten.expand.default(unsqueeze, [64, 4, 64])",
        "exp: float32[64, 4, 64] = aten.exp.default(expand)",
        "sum_1: float32[64, 4] = aten.sum.dim_IntList(exp, [2])",
    ]
    text = forward(*lines, inputs="    primals_4: int64[64],\n", result="sum_1")
    for region in regions(text):
        read = next(node for node in region.widest.graph.nodes if node.name == "index")
        if read in region.members and "index" in places(region):
            assert "mm" not in places(region)


def test_two_places_of_rows_are_none() -> None:
    """A product of a value with itself."""
    lines = [
        "t: float32[4, 64].strides(1, 4) = aten.t.default(primals_1)",
        "mm: float32[64, 64] = aten.mm.default(primals_1, t)",
        "t_1: float32[64, 64].strides(1, 64) = aten.t.default(mm)",
        "add: float32[64, 64] = aten.add.Tensor(mm, t_1)",
        "mm_1: float32[64, 4] = aten.mm.default(add, primals_1)",
    ]
    for region in regions(forward(*lines, result="mm_1")):
        assert not {"mm", "t_1"} <= names(region) or places(region)["mm"] != places(region)["t_1"]


TRANSPOSED = """
def joint(
    primals_1: float32[64, 4],
    primals_2: float32[4, 128],  # parameter
    tangents_1: float32[4, {wide}, 16],
):
    # forward
    mm: float32[64, 128] = aten.mm.default(primals_1, primals_2)
    view: float32[4, 16, 128] = aten.view.default(mm, [4, 16, 128])
    across: float32[4, 128, 16].strides(2048, 1, 128) = aten.transpose.int(view, 1, 2)
    tanh: float32[4, 128, 16].strides(2048, 1, 128) = aten.tanh.default(across)
    {last}
    # backward
    back: float32[4, {wide}, 16] = aten.neg.default(tangents_1)
    return (last,), (None, None)
"""


def test_other_dimensions_may_be_between_those_of_rows() -> None:
    """Where a loss is of logits ``[B, V, T]``."""
    largest = "last: float32[4, 1, 16] = aten.amax.default(tanh, [1], True)"
    (region,) = regions(TRANSPOSED.format(wide=1, last=largest))
    assert names(region) == {"mm", "view", "across", "tanh", "last"}
    assert {places(region)[name] for name in ("across", "tanh")} == {(0, 2)}
    assert places(region)["last"] == (0, 1, 2)


def test_no_other_dimensions_are_between_those_of_rows_that_are_returned() -> None:
    """A tile is one part of one dimension."""
    some = "last: float32[4, 2, 16].strides(2048, 1, 128) = aten.slice.Tensor(tanh, 1, 0, 2)"
    assert not any("mm" in names(region) for region in regions(TRANSPOSED.format(wide=2, last=some)))


@pytest.mark.parametrize(
    "between",
    [
        "bernoulli: float32[64, 128] = aten.bernoulli.p(mm, 0.5)",
        "cumsum: float32[64, 128] = aten.cumsum.default(mm, 0)",
        "softmax: float32[64, 128] = aten._softmax.default(mm, 0, False)",
        "sort: float32[64, 128] = aten.flip.default(mm, [0])",
    ],
)
def test_what_draws_or_mixes_rows_is_none_of_a_region(between: str) -> None:
    name = between.partition(":")[0]
    lines = [UP, between, f"mm_1: float32[64, 4] = aten.mm.default({name}, primals_3)"]
    for region in regions(forward(*lines, result="mm_1")):
        node = next(node for node in region.widest.graph.nodes if node.name == name)
        assert node not in region.members or region.where.get(node) == (1,)
        assert name != "bernoulli" or node not in region.members


HEAD = """
def joint(
    primals_1: float32[64, 4],
    primals_2: float32[4, 128],  # parameter
    primals_3: int64[64],
    tangents_1: {kind}[{shape}],
):
    # forward
    mm: {kind}[64, 128] = {up}
    scores: {kind}[64, 128] = aten._log_softmax.default(mm, 1, False)
    nll: ({kind}[], {kind}[]) = aten.nll_loss_forward.default(scores, primals_3, None, 2, -100)
    loss: {kind}[] = nll[0]
    # backward
    number: {kind}[] = {scale}
    ones: {kind}[] = aten.full.default([], 1.0, dtype=torch.{kind})
    nll_loss_backward: {kind}[64, 128] = aten.nll_loss_backward.default(number, scores, primals_3, None, 2, -100, ones)
    back: {kind}[64, 128] = aten._log_softmax_backward_data.default(nll_loss_backward, scores, 1, torch.{kind})
    copy: float32[64, 128] = {copy}
    t: float32[4, 64].strides(1, 4) = aten.t.default(primals_1)
    mm_1: float32[4, 128] = aten.mm.default(t, copy)
    return (loss,), (None, mm_1, None)
"""


def head(
    kind: str = "float32",
    up: str = "aten.mm.default(primals_1, primals_2)",
    scale: str = "aten.neg.default(tangents_1)",
    copy: str = "aten.alias.default(back)",
) -> list[TileRegion]:
    return regions(HEAD.format(kind=kind, shape="", up=up, scale=scale, copy=copy))


def test_a_backward_that_waits_for_one_number_is_proportional_to_it() -> None:
    (region,) = head()
    assert region.scalar is not None and region.scalar.name == "tangents_1"
    assert {"number", "loss", "mm_1"} <= names(region)
    assert {node.name for node in region.whole} == {"number"}


def test_what_is_not_proportional_is_not_made_before() -> None:
    (region,) = head(scale="aten.exp.default(tangents_1)")
    assert region.scalar is None or region.scalar.name == "number"
    (region,) = head(copy="aten.round.default(back)")
    assert region.scalar is None


def test_gradients_that_depend_on_the_whole_loss_are_not_made_before() -> None:
    (region,) = head(scale="aten.mul.Tensor(tangents_1, loss)")
    assert region.scalar is None or region.scalar.name == "number"
    if region.scalar is not None:
        assert "number" not in names(region)


def test_regions_are_found_as_far_as_they_are_asked_for() -> None:
    narrow_up = "mm_2: float32[64, 32] = aten.mm.default(primals_1, primals_4)"
    narrow_tanh = "tanh_1: float32[64, 32] = aten.tanh.default(mm_2)"
    narrow_down = "mm_3: float32[64, 4] = aten.mm.default(tanh_1, primals_5)"
    weights = "    primals_4: float32[4, 32],  # parameter\n    primals_5: float32[32, 4],  # parameter\n"
    text = forward(UP, TANH, DOWN, narrow_up, narrow_tanh, narrow_down, inputs=weights, result="mm_1, mm_3")
    asked = TileRegions(joint_of(text))
    assert asked.find_wide_regions(64 * 128 + 1) == []
    (wide,) = asked.find_wide_regions(64 * 33)
    assert "tanh" in names(wide)
    assert [names(region) for region in asked.find_wide_regions(1)] == [names(region) for region in regions(text)]
    assert len(asked.regions) == 2
    by_width = [len(found) for found in TileRegions(joint_of(text)).iterate_by_width()]
    assert by_width == sorted(by_width) and {1, 2} <= set(by_width)
