"""Memory of fused stage modules, estimated from their graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import roundpipe_fx
from roundpipe_fx.analysis.fused_memory import follow_fused
from roundpipe_fx.analysis.liveness import Event, find_peak
from roundpipe_fx.codegen import StageModule
from roundpipe_fx.ir.joint_graph import Phase
from roundpipe_fx.planner import judged_by_code
from tests.runtime.test_compiled_memory import MODELS, Words

SIDE = 64
SQUARE = 4 * SIDE * SIDE

Function = Callable[..., tuple[torch.Tensor, ...]]


def _stage(function: Function, inputs: int, phase: Phase = Phase.BACKWARD) -> StageModule:
    module = make_fx(function, tracing_mode="fake")(*(torch.randn(SIDE, SIDE) for _ in range(inputs)))
    placeholders = tuple(module.graph.find_nodes(op="placeholder"))
    return StageModule(stage=0, phase=phase, module=module, inputs=placeholders, outputs=(), fingerprint="")


def _peak(function: Function, inputs: int, dying: Collection[int] = (), phase: Phase = Phase.BACKWARD) -> float:
    """Squares that are allocated at most at one time, beside the inputs."""
    followed = follow_fused(_stage(function, inputs, phase), [[number] for number in range(inputs)], dying)
    events = [Event(None, reads, makes, workspace=size) for _, reads, makes, size in followed.operations]
    returned = [storage for leaves in followed.returns for storage in leaves]
    return find_peak(events, [0] * inputs + followed.sizes, lasting=returned).bytes / SQUARE


def test_a_chain_of_pointwise_operations_allocates_its_result() -> None:
    assert _peak(lambda x: (x.sin().cos().tanh(),), 1) == 1


def test_what_a_product_reads_is_allocated() -> None:
    assert _peak(lambda x, w: (x.sin() @ w,), 2) == 2
    assert _peak(lambda x, w: (x @ w,), 2) == 1


def test_a_value_that_waits_for_a_product_of_itself_is_allocated() -> None:
    """The end of a residual connection."""
    assert _peak(lambda x, w: (_with_residual(x, w),), 2) == 3


def _with_residual(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = x.sin()
    return hidden + hidden.cos() @ w


def test_a_result_is_written_over_what_dies_in_the_kernel() -> None:
    assert _peak(lambda x, w: ((x @ w).sin(),), 2) == 1
    assert _peak(lambda x, w: ((x @ w).sin() @ w,), 2) == 2
    assert _peak(lambda x: (x.sin(),), 1, dying=[0]) == 0
    assert _peak(lambda x: (x.sin(),), 1, dying=[]) == 1
    assert _peak(lambda x: (x.sin(), x), 1, dying=[0]) == 1
    # A forward's inputs are not given away: the user may hold them, or the backward read them.
    assert _peak(lambda x: (x.sin(),), 1, dying=[0], phase=Phase.FORWARD) == 1


def test_a_reduction_is_made_once() -> None:
    """The wide operand is gone before another wide value is made, which is multiplied by the reduction."""
    assert _peak(lambda x, w: ((x @ w).sum(1, True) * (w @ w),), 2) == pytest.approx(1, abs=0.1)


def test_a_head_needs_one_gradient() -> None:
    """The gradient of a loss with a softmax is one value of the scores' size, which may be written over these."""

    def backward(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.softmax(scores / 30, 1) * (1 - scores**2),)

    assert _peak(backward, 1) == pytest.approx(1, abs=0.05)
    assert _peak(backward, 1, dying=[0]) == pytest.approx(0, abs=0.05)


def test_what_costs_much_is_written_for_the_next_loop() -> None:
    """The kernel that finds the largest score writes what the kernel that sums up reads."""
    assert _peak(lambda x: (torch.softmax(x.tanh(), 1).amax(1),), 1) == pytest.approx(1, abs=0.1)
    assert _peak(lambda x: (torch.softmax(x * 3, 1).amax(1),), 1) == pytest.approx(0, abs=0.1)
    assert _peak(lambda x: ((x.tanh().view(-1) * x.tanh().amax()).sum(),), 1) == pytest.approx(0, abs=0.1)
    assert _peak(lambda x: (_divide_by_largest(x.tanh()).sum(),), 1) == pytest.approx(1, abs=0.1)
    assert _peak(lambda x: (_divide_by_largest(x * 3).sum(),), 1) == pytest.approx(0, abs=0.1)


def _divide_by_largest(x: torch.Tensor) -> torch.Tensor:
    return x.t() / x.view(-1).amax()


class Capped(nn.Module):
    """A head whose scores are capped: operation by operation, the gradient's chain needs them several times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 32)
        self.layer = nn.Linear(32, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.words(tokens)).tanh()
        scores = 60 * torch.sigmoid(hidden @ self.words.weight.t() / 15) - 30
        return F.cross_entropy(scores.flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize("name", ["blocks", "words", "images", "capped"])
@pytest.mark.long
def test_all_schedules_are_estimated_nearly_as_their_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = MODELS["words"][1]
    make, inputs = {**MODELS, "words": (lambda: Words(layers=1), tokens), "capped": (Capped, tokens)}[name]
    seen: list[tuple[int, int]] = []

    def judge_all(
        count: int, estimated: Callable[[int], int], judge: Callable[[int], int], *rest: object
    ) -> int | None:
        seen.extend((estimated(position), judge(position)) for position in range(count))
        return count - 1

    monkeypatch.setattr(judged_by_code, "find_least_recomputed", judge_all)
    roundpipe_fx.compile(make(), memory_budget=0.5, stage_compiler="inductor").trace(inputs())
    estimates, code = zip(*seen, strict=True)
    ratios = [estimate / size for estimate, size in zip(estimates, code, strict=True)]
    assert len(ratios) > 1 and min(ratios) > 0.85 and max(ratios) < 1.1, ratios
