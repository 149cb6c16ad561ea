"""Wide values of narrow ones are made for each reader within a budget; results have the same bits, and need less."""

from __future__ import annotations

from typing import Any

import expecttest
import pytest
import torch
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.analysis.cost import cost_model
from roundpipe_fx.ir.joint_graph import JointGraph
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.cse import eliminate_common_subexpressions
from roundpipe_fx.passes.wide_values import compute_for_each_reader
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import assert_bitwise, compiled_step, eager_step, train_step
from tests.graph_text import after

aten = torch.ops.aten
LENGTH = 32


class Masked(nn.Module):
    """Layers of attention that share a mask, which is made of one number for each token, in one of several ways."""

    def __init__(self, way: str = "", depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(1, 1))
        self.register_buffer("count", torch.zeros(1, LENGTH))
        self.way = way

    def mask(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.arange(LENGTH)[None, :, None], torch.arange(LENGTH)[None, None]
        mask = (columns <= rows) & tokens[:, None, :]
        if self.way == "of a product":
            return mask & (x @ x.transpose(-1, -2) > 0)
        if self.way == "drawn":
            return mask & (torch.rand(mask.shape) > 0.1)
        if self.way == "of a wide input":
            return mask & self.wide
        if self.way == "of an updated buffer":
            mask = mask == (self.count[:, None] < 1)
            self.count.add_(1)
        return mask

    def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-1, -2)
        if self.way == "as a view":
            mask = mask.transpose(-1, -2).transpose(-1, -2)
        if self.way == "added":
            return (scores + mask.float().log().clamp(min=-1e4)).softmax(-1) @ x
        if self.way == "multiplied":
            return (scores * mask.float()) @ x
        if self.way == "with a gradient":
            return (scores * (mask.float() * self.scale)) @ x
        return scores.masked_fill(~mask, -1e4).softmax(-1) @ x

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, wide: Any = None) -> Any:
        self.wide = wide
        mask = self.mask(x, tokens)
        for layer in self.layers:
            x = layer(self.attend(x, mask))
        return (x.sum(), mask) if self.way == "returned" else x.sum()


def batch(way: str = "") -> dict[str, torch.Tensor]:
    tokens = torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])
    wide = {"wide": torch.rand(2, LENGTH, LENGTH) > 0.1} if way == "of a wide input" else {}
    return {"x": torch.randn(2, LENGTH, 8), "tokens": tokens, **wide}


def captured(way: str) -> JointGraph:
    return capture_joint(Masked(way), **batch(way))


def count(joint: JointGraph, target: Any) -> int:
    return sum(node.target is target for node in joint.computed())


REMADE = ["", "as a view", "added", "multiplied", "of an updated buffer"]
KEPT = ["of a product", "drawn", "of a wide input", "returned"]


@pytest.mark.parametrize("way", [*REMADE, *KEPT])
@pytest.mark.quick_every(2)
def test_a_mask_of_narrow_values_is_made_for_each_reader(way: str) -> None:
    joint = captured(way)
    inputs = example_inputs(joint)
    torch.manual_seed(0)
    expected = run_joint(joint, inputs)
    assert count(joint, aten.le.Tensor) == 1
    compute_for_each_reader(joint)
    joint.graph.lint()
    assert count(joint, aten.le.Tensor) == (3 if way in REMADE else 1)
    torch.manual_seed(0)
    for result, reference in zip(run_joint(joint, inputs), expected, strict=True):
        assert (result is None) == (reference is None)
        assert reference is None or (torch.equal(result, reference) and result.stride() == reference.stride())


def test_each_is_made_before_its_reader() -> None:
    joint = compute_for_each_reader(captured(""))
    kinds = {aten.le.Tensor: "made", aten.bmm.default: "product"}
    forward = list(joint.computed())[: -sum(node in joint.find_tangent_dependents() for node in joint.computed())]
    order = [kinds[node.target] for node in forward if node.target in kinds]
    assert order == ["product", "made", "product"] * 3


def test_readers_next_to_each_other_share_one() -> None:
    class Twice(Masked):
        def attend(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            scores = x @ x.transpose(-1, -2)
            return (scores.masked_fill(~mask, -1.0) + scores.masked_fill(mask, 1.0)) @ x

    joint = compute_for_each_reader(capture_joint(Twice(), **batch()))
    assert count(joint, aten.le.Tensor) == 3


def test_one_serves_all_where_everything_is_saved() -> None:
    for way in REMADE:
        joint = annotate(compute_for_each_reader(captured(way)), cost_model("roofline", torch.device("cpu"), None))
        eliminate_common_subexpressions(joint)
        joint.graph.lint()
        assert count(joint, aten.le.Tensor) == 1


def test_nothing_is_made_anew_without_a_budget() -> None:
    roundpipe = roundpipe_fx.compile(Masked(), stages=3)
    plan = roundpipe.trace(**batch())
    assert "".join(plan.sources().values()).count("aten.le.Tensor(") == 1


@pytest.mark.parametrize("way", [*REMADE, "with a gradient"])
@pytest.mark.parametrize("options", [{"memory_budget": 0.0}, {"memory_budget": 0.3}, {"recompute": "full"}])
@pytest.mark.quick_every(5)
def test_bits_are_those_of_eager(way: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, inputs = Masked(way), batch(way)
    torch._dynamo.reset()
    step, compiled = compiled_step(model, inputs, **options)
    assert_bitwise(step, eager_step(model, inputs))
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**inputs).backward()
    assert peak.bytes <= compiled.plan.peak_bytes


def padded(length: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(64, (2, length), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": tokens,
        "labels": tokens,
        "attention_mask": (torch.arange(length) < torch.tensor([[length], [length // 3]])).long(),
    }


def decoder(layers: int, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.long
def test_a_padded_llama_holds_no_mask_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs, length = decoder(3), padded(128), 128
    step, compiled = compiled_step(model, inputs, memory_budget=0.0)
    assert_bitwise(step, eager_step(model, inputs))
    plan = compiled.plan
    texts = [text for name, text in plan.sources().items() if "forward" in name]
    # What a stage is given stands before its operations, a line for each with the type as a comment.
    entering = [line for text in texts for line in text.splitlines() if ",  # " in line]
    assert entering and not [line for line in entering if f"{length}, {length}]" in line]
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**inputs).loss.backward()
    assert peak.bytes <= plan.peak_bytes
    monkeypatch.setenv("ROUNDPIPE_FX_DISABLE", "wide_values")
    torch._dynamo.reset()
    held = roundpipe_fx.compile(decoder(3), memory_budget=0.0).trace(**inputs)
    assert plan.peak_bytes < held.peak_bytes


@pytest.mark.long
def test_tiles_make_only_the_rows_of_a_mask_that_they_read(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 32
    model, inputs = decoder(2, width=8), padded(length)
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        roundpipe_fx.compile(model, memory_budget=1).trace(**inputs)
    torch._dynamo.reset()
    with monkeypatch.context() as patched, pytest.raises(roundpipe_fx.InfeasibleBudgetError) as held:
        patched.setenv("ROUNDPIPE_FX_DISABLE", "wide_values")
        roundpipe_fx.compile(model, memory_budget=1).trace(**inputs)
    numbers = 4 * 2 * length * length
    budget = refused.value.minimum
    assert budget <= held.value.minimum - numbers
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=budget)
    loss = compiled(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, decoder(2, width=8)(**inputs).loss)
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**inputs).loss.backward()
    assert peak.bytes <= budget
    assert any(tiles.tiles == length for tiles in compiled.plan.tiles)


@pytest.mark.long
def test_inductor_makes_masks_in_its_kernels() -> None:
    model, inputs = Masked(), batch()
    reference = eager_step(model, inputs)
    compiled = roundpipe_fx.compile(model, memory_budget=0.3, stage_compiler="inductor")
    step = train_step(compiled, compiled, inputs)
    torch.testing.assert_close(step.loss, reference.loss)
    torch.testing.assert_close(step.gradients, reference.gradients)


def test_as_text_each_reader_has_its_own() -> None:
    before = """\
def joint(
    tokens: bool[128],
    x: float32[128, 128],
):
    # captured
    columns: int64[128] = aten.arange.default(128)
    rows: int64[128, 1] = aten.unsqueeze.default(columns, 1)
    le: bool[128, 128] = aten.le.Tensor(columns, rows)
    mask: bool[128, 128] = aten.bitwise_and.Tensor(le, tokens)
    mul: float32[128, 128] = aten.mul.Tensor(x, mask)
    mm: float32[128, 128] = aten.mm.default(mul, x)
    mul_1: float32[128, 128] = aten.mul.Tensor(mm, mask)
    mm_1: float32[128, 128] = aten.mm.default(mul_1, x)
    return (mm_1,), ()
"""
    made = after(compute_for_each_reader, before, name="wide_values")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    tokens: bool[128],
    x: float32[128, 128],
):
    # captured
    columns: int64[128] = aten.arange.default(128)
    rows: int64[128, 1] = aten.unsqueeze.default(columns, 1)
    le_tensor_1: bool[128, 128] = aten.le.Tensor(columns, rows)
    bitwise_and_tensor_1: bool[128, 128] = aten.bitwise_and.Tensor(le_tensor_1, tokens)
    mul: float32[128, 128] = aten.mul.Tensor(x, bitwise_and_tensor_1)
    mm: float32[128, 128] = aten.mm.default(mul, x)
    le_tensor_2: bool[128, 128] = aten.le.Tensor(columns, rows)
    bitwise_and_tensor_2: bool[128, 128] = aten.bitwise_and.Tensor(le_tensor_2, tokens)
    mul_1: float32[128, 128] = aten.mul.Tensor(mm, bitwise_and_tensor_2)
    mm_1: float32[128, 128] = aten.mm.default(mul_1, x)
    return (mm_1,), ()
""",
    )


def test_as_text_a_value_of_a_wide_one_stays() -> None:
    before = """\
def joint(
    x: float32[16, 16],
):
    # captured
    mask: bool[16, 16] = aten.gt.Scalar(x, 0)
    mul: float32[16, 16] = aten.mul.Tensor(x, mask)
    mm: float32[16, 16] = aten.mm.default(mul, x)
    mul_1: float32[16, 16] = aten.mul.Tensor(mm, mask)
    return (mul_1,), ()
"""
    made = after(compute_for_each_reader, before, name="wide_values")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[16, 16],
):
    # captured
    mask: bool[16, 16] = aten.gt.Scalar(x, 0)
    mul: float32[16, 16] = aten.mul.Tensor(x, mask)
    mm: float32[16, 16] = aten.mm.default(mul, x)
    mul_1: float32[16, 16] = aten.mul.Tensor(mm, mask)
    return (mul_1,), ()
""",
    )
