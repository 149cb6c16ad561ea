"""Operations next to a region join where fewer bytes then exist beside its loops, and only there."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from roundpipe_fx.analysis.tiling import KINDS, TileRegion, TileRegions
from roundpipe_fx.ir.joint_graph import JointGraph, Phase
from tests.graph_text import joint_of

BLOCK = KINDS[0]

GATED = """
def joint(
    primals_1: float32[64, 4],
    primals_2: float32[4, 128],  # parameter
    primals_3: float32[4, 128],  # parameter
    primals_4: float32[128, 4],  # parameter
    tangents_1: float32[64, 4],
):
    # forward
    x: float32[64, 4] = aten.neg.default(primals_1)
    norm: float32[64, 4] = aten.tanh.default(x)
    mm: float32[64, 128] = aten.mm.default(norm, primals_2)
    mm_1: float32[64, 128] = aten.mm.default(norm, primals_3)
    gate: float32[64, 128] = aten.mul.Tensor(mm, mm_1)
    down: float32[64, 4] = aten.mm.default(gate, primals_4)
    y: float32[64, 4] = aten.add.Tensor(x, down)
    {forward}
    # backward
    dy: float32[64, 4] = aten.neg.default(tangents_1)
    t: float32[4, 128].strides(1, 4) = aten.t.default(primals_4)
    dgate: float32[64, 128] = aten.mm.default(dy, t)
    d1: float32[64, 128] = aten.mul.Tensor(dgate, mm_1)
    d2: float32[64, 128] = aten.mul.Tensor(dgate, mm)
    t_1: float32[128, 4].strides(1, 128) = aten.t.default(primals_2)
    t_2: float32[128, 4].strides(1, 128) = aten.t.default(primals_3)
    dn1: float32[64, 4] = aten.mm.default(d1, t_1)
    dn2: float32[64, 4] = aten.mm.default(d2, t_2)
    dn: float32[64, 4] = aten.add.Tensor(dn1, dn2)
    dx1: float32[64, 4] = aten.tanh_backward.default(dn, norm)
    dx: float32[64, 4] = aten.add.Tensor(dy, dx1)
    {backward}
    return ({result},), (dx, {gradient}, None, None)
"""
"""A gated MLP behind what stands for a norm, with a residual connection."""
NOTHING = "nothing: float32[4, 64].strides(1, 4) = aten.t.default(primals_1)"


def gated(
    forward: str = NOTHING,
    backward: str = NOTHING.replace("nothing", "none"),
    result: str = "y",
    gradient: str = "None",
    dtype: str = "float32",
) -> TileRegion:
    text = GATED.format(forward=forward, backward=backward, result=result, gradient=gradient)
    region = TileRegions(joint_of(text.replace("float32", dtype)), KINDS).find_wide_regions(64 * 128)[0]
    assert region.kind is BLOCK
    return region


def borders(region: TileRegion, phase: Phase) -> tuple[set[str], set[str]]:
    """Names of what the loop of a phase reads by rows, and of what others read of it."""
    members, inside = region.in_phase(phase), set(region.members)
    read = {source.name for node in members for source in node.all_input_nodes if source not in inside}
    rows = {node.name for node in region.where}
    return read & rows, {node.name for node in members if any(user not in inside for user in node.users)}


def test_a_block_is_a_loop_from_one_residual_value_to_the_next() -> None:
    region = gated()
    assert borders(region, Phase.FORWARD) == ({"x"}, {"y"})
    assert borders(region, Phase.BACKWARD) == ({"dy"}, {"dx"})


def test_what_is_returned_as_well_would_not_become_less() -> None:
    """The norm's result exists anyway, and so does what is read next to it."""
    region = gated(result="y, norm")
    assert "norm" not in {node.name for node in region.members}
    assert borders(region, Phase.FORWARD) == ({"norm", "x"}, {"y"})


def test_a_value_that_the_backward_reads_as_a_whole_stays_outside() -> None:
    """A weight's gradient that sums over shifted rows reads all of them: else the loop would run again for them."""
    shifted = "shifted: float32[64, 4] = aten.flip.default(norm, [0])"
    weight = "weight: float32[4, 4] = aten.mm.default(across, dy)"
    across = "across: float32[4, 64].strides(1, 4) = aten.t.default(shifted)"
    region = gated(backward="\n    ".join([shifted, across, weight]), gradient="weight")
    inside = {node.name for node in region.members}
    assert "norm" not in inside
    # The sum of gradients reads nothing of the forward.
    assert {"dn", "dn1", "dn2"} <= inside and "dx1" not in inside


def test_a_value_of_the_forward_is_not_read_whole_for_it() -> None:
    """It would have to exist beside the loop."""
    other = "other: float32[64, 4] = aten.cos.default(primals_1)"
    scaled = "scaled: float32[64, 4] = aten.mul.Tensor(dn, other)"
    total = "total: float32[64, 1] = aten.sum.dim_IntList(scaled, [1], True)"
    region = gated(forward=other, backward=f"{scaled}\n    {total}", gradient="total")
    inside = {node.name for node in region.members}
    assert "dn" in inside and not {"scaled", "total"} & inside


@pytest.mark.parametrize(("dtype", "joins"), [("float32", True), ("bfloat16", True), ("float16", False)])
def test_sums_over_tiles_of_float16_do_not_join(dtype: str, joins: bool) -> None:
    """The gradient of a bias would have larger errors than without tiles."""
    total = "total: float32[4] = aten.sum.dim_IntList(dn, [0])"
    inside = {node.name for node in gated(backward=total, gradient="total", dtype=dtype).members}
    assert "dn" in inside and ("total" in inside) is joins


def test_what_runs_between_two_members_joins_or_none_of_them_does() -> None:
    """Rows from the last to the first: no tile has those that it needs."""
    lines = [
        "narrow: float32[64, 1] = aten.sum.dim_IntList(y, [1], True)",
        "backwards: float32[64, 1] = aten.flip.default(narrow, [0])",
        "again: float32[64, 4] = aten.add.Tensor(backwards, y)",
        "last: float32[64, 1] = aten.sum.dim_IntList(again, [1], True)",
    ]
    inside = {node.name for node in gated(forward="\n    ".join(lines), result="last").members}
    # y would no longer be read behind the loop.
    assert "y" in inside and not {"backwards", "again", "last"} & inside


HEAD = """
def joint(
    primals_1: float32[64, 4],
    primals_2: float32[4, 128],  # parameter
    primals_3: int64[64],
    tangents_1: float32[],
):
    # forward
    x: float32[64, 4] = aten.neg.default(primals_1)
    mm: float32[64, 128] = aten.mm.default(x, primals_2)
    scores: float32[64, 128] = aten._log_softmax.default(mm, 1, False)
    nll: (float32[], float32[]) = aten.nll_loss_forward.default(scores, primals_3, None, 2, -100)
    loss: float32[] = nll[0]
    # backward
    ones: float32[] = aten.full.default([], 1.0, dtype=torch.float32)
    logits: float32[64, 128] = aten.nll_loss_backward.default(tangents_1, scores, primals_3, None, 2, -100, ones)
    back: float32[64, 128] = aten._log_softmax_backward_data.default(logits, scores, 1, torch.float32)
    t: float32[128, 4].strides(1, 128) = aten.t.default(primals_2)
    dx: float32[64, 4] = aten.mm.default(back, t)
    dx1: float32[64, 1] = aten.{last}(dx, [1], True)
    return (loss,), (dx1, None, None)
"""


@pytest.mark.parametrize(("last", "joins"), [("sum.dim_IntList", True), ("amax.default", False)])
def test_a_loss_head_stays_proportional_to_its_gradient(last: str, joins: bool) -> None:
    """Forward and backward in one loop are worth more than a narrower border."""
    (region,) = TileRegions(joint_of(HEAD.format(last=last)), KINDS).find_wide_regions(64 * 128)
    assert region.scalar is not None
    inside = {node.name for node in region.members}
    assert "dx" in inside and ("dx1" in inside) is joins


WIDTHS = (1, 2, 4)
WEIGHTS = {f"wide{k}": (128, k) for k in WIDTHS} | {f"w{a}{b}": (a, b) for a in WIDTHS for b in WIDTHS}


def add_operations(draw: st.DrawFn, width: dict[str, int], reads: dict[str, set[str]]) -> list[str]:
    """Lines of operations on values that there are, some of which need all rows at once.

    Args:
        width: of each value; extended.
        reads: by value, what its operation reads; extended.
    """
    lines = []
    for number in range(draw(st.integers(1, 7))):
        name, source = f"v{number}", draw(st.sampled_from(sorted(width)))
        other = draw(st.sampled_from(sorted(other for other in width if width[other] == width[source])))
        kind = draw(st.sampled_from(["add", "add", "mm", "neg", "flip"]))
        width[name] = draw(st.sampled_from(WIDTHS)) if kind == "mm" else width[source]
        reads[name] = {source, other} if kind == "add" else {source}
        call = {
            "add": f"add.Tensor({source}, {other})",
            "mm": f"mm.default({source}, w{width[source]}{width[name]})",
            "neg": f"neg.default({source})",
            "flip": f"flip.default({source}, [0])",
        }[kind]
        lines.append(f"{name}: float32[64, {width[name]}] = aten.{call}")
    return lines


def graph_of(lines: list[str], returned: list[str]) -> str:
    inputs = "".join(
        f"    {name}: float32[{rows}, {columns}],  # parameter\n" for name, (rows, columns) in WEIGHTS.items()
    )
    body = "".join(f"    {line}\n" for line in lines)
    return (
        "def joint(\n    primals_1: float32[64, 4],\n    primals_2: float32[4, 128],  # parameter\n"
        f"{inputs}    tangents_1: float32[64, 1],\n):\n    # forward\n{body}    # backward\n"
        "    back: float32[64, 1] = aten.neg.default(tangents_1)\n"
        f"    return ({', '.join(returned)},), (None, None{', None' * len(WEIGHTS)})\n"
    )


@st.composite
def tails(draw: st.DrawFn) -> str:
    """Graphs with operations behind a wide value."""
    width, reads = {"first": 4, "outside": draw(st.sampled_from([2, 4]))}, {"first": set[str](), "outside": set[str]()}
    operations = add_operations(draw, width, reads)
    # What does not depend on the wide value is made before it.
    apart = {"outside"}
    for name, sources in reads.items():
        apart |= {name} if sources and sources <= apart else set()
    lines = [
        f"outside: float32[64, {width['outside']}] = aten.mm.default(primals_1, w4{width['outside']})",
        *(line for line in operations if line.partition(":")[0] in apart),
        "mm: float32[64, 128] = aten.mm.default(primals_1, primals_2)",
        "tanh: float32[64, 128] = aten.tanh.default(mm)",
        "first: float32[64, 4] = aten.mm.default(tanh, wide4)",
        *(line for line in operations if line.partition(":")[0] not in apart),
    ]
    return graph_of(lines, [name for name in width if not any(name in sources for sources in reads.values())])


@st.composite
def beginnings(draw: st.DrawFn) -> str:
    """Graphs with operations before a wide value."""
    width, reads = {"start": 4}, {"start": set[str]()}
    operations = add_operations(draw, width, reads)
    last = draw(st.sampled_from([name for name in width if width[name] == 4]))
    unread = [name for name in width if name != last and not any(name in sources for sources in reads.values())]
    kept = draw(st.lists(st.sampled_from(sorted(width)), max_size=1))
    lines = [
        "start: float32[64, 4] = aten.neg.default(primals_1)",
        *operations,
        f"mm: float32[64, 128] = aten.mm.default({last}, primals_2)",
        "tanh: float32[64, 128] = aten.tanh.default(mm)",
        "first: float32[64, 4] = aten.mm.default(tanh, wide4)",
    ]
    return graph_of(lines, list(dict.fromkeys(["first", *unread, *kept])))


def bytes_behind(joint: JointGraph, inside: set[fx.Node]) -> int:
    """Bytes of the values that exist when the loop has run, and are still read."""
    forward = joint.in_phase(Phase.FORWARD)
    after: set[fx.Node] = set()
    for node in forward:
        if node not in inside and any(source in inside or source in after for source in node.all_input_nodes):
            after.add(node)
    exist = [node for node in forward if node not in after]
    return sum(
        node.meta["val"].numel() * 4
        for node in exist
        if any(user in after or user.op == "output" for user in node.users)
    )


def bytes_before(joint: JointGraph, inside: set[fx.Node]) -> int:
    """Bytes of the values that exist when the loop begins, or are made in it, and are read in it or later."""
    return sum(
        node.meta["val"].numel() * 4
        for node in joint.in_phase(Phase.FORWARD)
        if any(user.op == "output" or (user in inside and node not in inside) for user in node.users)
    )


def related(joint: JointGraph, core: set[fx.Node], behind: bool) -> set[fx.Node]:
    """The forward's operations that depend on some, or that these depend on."""
    found: set[fx.Node] = set()
    forward = joint.in_phase(Phase.FORWARD)
    for node in forward if behind else reversed(forward):
        others = node.all_input_nodes if behind else node.users
        if node not in core and any(other in core or other in found for other in others):
            found.add(node)
    return found


def check_least(text: str, behind: bool) -> None:
    """Hold the bytes beside a region against those of every other choice."""
    joint = joint_of(text)
    (region,) = TileRegions(joint, KINDS).find_wide_regions(64 * 128)
    inside = set(region.members)
    core = {node for node in inside if node.name in ("mm", "tanh", "first")}
    assert len(core) == 3
    others = related(joint, core, behind)
    possible = [node for node in others if "flip" not in str(node.target)]
    choices: Iterable[set[fx.Node]] = (
        core | set(some) for count in range(len(possible) + 1) for some in itertools.combinations(possible, count)
    )
    count_bytes = bytes_behind if behind else bytes_before
    least = min(
        count_bytes(joint, chosen)
        for chosen in choices
        # What is between one of them and the core is one of them.
        if all(
            other in chosen or other not in others
            for node in chosen
            for other in (node.all_input_nodes if behind else node.users)
        )
    )
    assert count_bytes(joint, inside) == least


@given(tails())
def test_no_other_choice_leaves_fewer_bytes_behind(text: str) -> None:
    check_least(text, behind=True)


@given(beginnings())
def test_no_other_choice_leaves_fewer_bytes_before(text: str) -> None:
    check_least(text, behind=False)
