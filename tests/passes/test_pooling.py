from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.pooling import save_offsets_alone
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import eager_step, train_step
from tests.graph_text import after

aten = torch.ops.aten


def _unpooled(x: torch.Tensor) -> torch.Tensor:
    """Read positions in the forward, too."""
    y, positions = F.max_pool2d(x, 2, return_indices=True)
    return F.max_unpool2d(y.sin(), positions, 2)


Pool = Callable[[torch.Tensor], torch.Tensor]
MAXIMA: dict[str, tuple[tuple[int, ...], Pool]] = {
    "halves": ((6, 8), lambda x: F.max_pool2d(x, 2)),
    "overlapping": ((7, 9), lambda x: F.max_pool2d(x, 3, 2, 1)),
    "beyond the image": ((7, 9), lambda x: F.max_pool2d(x, (2, 3), 2, ceil_mode=True)),
    "dilated": ((9, 9), lambda x: F.max_pool2d(x, 2, 1, dilation=3)),
    "of one image": ((6, 8), lambda x: F.max_pool2d(x[0], 2)),
    "unpooled": ((6, 8), _unpooled),
    "in space": ((4, 6, 4), lambda x: F.max_pool3d(x, 2)),
}
OTHERS: dict[str, tuple[tuple[int, ...], Pool]] = {
    "large windows": ((12, 12), lambda x: F.max_pool2d(x, 6, 3)),
    "averages": ((6, 8), lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "averages in space": ((4, 6, 4), lambda x: F.avg_pool3d(x, 2)),
    "as many as asked": ((6, 8), lambda x: F.adaptive_avg_pool2d(x, (2, 3))),
    "as many as asked in space": ((4, 6, 4), lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2))),
}
POOLS = MAXIMA | OTHERS


class Pooled(nn.Module):
    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))
        self.pool = pool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(x * self.weight.view(3, *[1] * (x.dim() - 2))).sin().sum()


def _case(name: str) -> tuple[Pooled, torch.Tensor]:
    space, pool = POOLS[name]
    return Pooled(pool).double(), torch.randn(2, 3, *space, dtype=torch.float64)


def _pooled_gradients(joint: JointGraph) -> list[fx.Node]:
    return [node for node in joint.computed() if "pool" in str(node.target) and "backward" in str(node.target)]


@pytest.mark.parametrize("name", POOLS)
def test_gradients_have_the_bits_of_eager_and_read_no_image(name: str) -> None:
    model, x = _case(name)
    joint = capture_joint(model, x)
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    (gradient,) = _pooled_gradients(save_offsets_alone(joint))
    read = gradient.args[1]
    assert isinstance(read, fx.Node) and read.meta["val"].untyped_storage().nbytes() == 8
    offsets = {node for node in joint.computed() if getattr(node.meta.get("val"), "dtype", None) is torch.int8}
    assert bool(offsets) is (name in MAXIMA)
    for value, reference in zip(run_joint(joint, inputs), expected, strict=True):
        assert (value is None and reference is None) or torch.equal(value, reference)


@pytest.mark.parametrize("name", ["overlapping", *(pytest.param(n, marks=pytest.mark.long) for n in POOLS)])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_stages_have_the_gradients_of_eager(name: str, dynamic: bool) -> None:
    model, x = _case(name)
    reference = eager_step(model, {"x": x})
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", dynamic=dynamic)
    torch.testing.assert_close(train_step(compiled, compiled, {"x": x}).gradients, reference.gradients)
    if dynamic:
        x = torch.cat([x, x[:1] + 1])
        reference = eager_step(model, {"x": x})
        torch.testing.assert_close(train_step(compiled, compiled, {"x": x}).gradients, reference.gradients)


@pytest.mark.parametrize(
    ("pool", "saved"),
    [
        (lambda x: F.max_pool2d(x, 2), 8 * 16 * 16),  # an offset of a byte for each maximum
        (lambda x: F.avg_pool2d(x, 2), 0),
    ],
)
def test_no_image_is_saved(pool: Pool, saved: int) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(1, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return pool(self.convolution(x)).sum()

    model = roundpipe_fx.compile(Images(), stage_compiler="inductor")
    plan = model.trace(torch.randn(1, 1, 32, 32))
    assert plan.saved_bytes == saved


def test_as_text_an_average_reads_sizes() -> None:
    made = after(
        save_offsets_alone,
        """\
def joint(
    x: float32[1, 1, 8, 6],
    tangents_1: float32[1, 1, 4, 3],
):
    pool: float32[1, 1, 8, 6] = aten.avg_pool2d_backward.default(tangents_1, x, [2, 2], [], [0, 0], False, True, None)
    return (), (pool,)
""",
    )
    assert_expected_inline(
        made,
        """\
def joint(
    x: float32[1, 1, 8, 6],
    tangents_1: float32[1, 1, 4, 3],
):
    # captured
    full_default: float32[] = aten.full.default([], 0, dtype=torch.float32, device=device(type='cpu'))
    expand_default: float32[1, 1, 8, 6].strides(0, 0, 0, 0) = aten.expand.default(full_default, [1, 1, 8, 6])
    pool: float32[1, 1, 8, 6] = aten.avg_pool2d_backward.default(tangents_1, expand_default, [2, 2], [], [0, 0], False, True, None)
    return (), (pool,)
""",
    )


def test_as_text_positions_are_computed_from_offsets() -> None:
    made = after(
        save_offsets_alone,
        """\
def joint(
    x: float32[1, 1, 8, 6],
    tangents_1: float32[1, 1, 4, 3],
):
    pool: (float32[1, 1, 4, 3], int64[1, 1, 4, 3]) = aten.max_pool2d_with_indices.default(x, [2, 2])
    y: float32[1, 1, 4, 3] = operator.getitem(pool, 0)
    indices: int64[1, 1, 4, 3] = operator.getitem(pool, 1)
    back: float32[1, 1, 8, 6] = aten.max_pool2d_with_indices_backward.default(tangents_1, x, [2], [], [0], [1], False, indices)
    return (y,), (back,)
""",
    )
    assert_expected_inline(
        made,
        """\
def joint(
    x: float32[1, 1, 8, 6],
    tangents_1: float32[1, 1, 4, 3],
):
    # captured
    _low_memory_max_pool_with_offsets_default: (float32[1, 1, 4, 3], int8[1, 1, 4, 3]) = torch.ops.prims._low_memory_max_pool_with_offsets.default(x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    getitem_2: float32[1, 1, 4, 3] = _low_memory_max_pool_with_offsets_default[0]
    getitem_3: int8[1, 1, 4, 3] = _low_memory_max_pool_with_offsets_default[1]
    _low_memory_max_pool_offsets_to_indices_default: int64[1, 1, 4, 3] = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default(getitem_3, [2, 2], [8, 6], [2, 2], [0, 0], [1, 1])
    full_default: float32[] = aten.full.default([], 0, dtype=torch.float32, device=device(type='cpu'))
    expand_default: float32[1, 1, 8, 6].strides(0, 0, 0, 0) = aten.expand.default(full_default, [1, 1, 8, 6])
    back: float32[1, 1, 8, 6] = aten.max_pool2d_with_indices_backward.default(tangents_1, expand_default, [2], [], [0], [1], False, _low_memory_max_pool_offsets_to_indices_default)
    return (getitem_2,), (back,)
""",
    )
