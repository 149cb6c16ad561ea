from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import transformers
from expecttest import assert_expected_inline
from torch import nn

import roundpipe_fx
from roundpipe_fx.passes.empty_operands import leave_out_empty_operands
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import eager_step, train_step
from tests.graph_text import after


def test_as_text_one_operand_is_copied_and_several_are_joined() -> None:
    before = """\
def joint(
    empty: float32[0],
    none: float32[2, 0, 4],
    x: float32[2, 3, 4],
    y: float32[2, 1, 4],
    h: bfloat16[2, 3, 4],
):
    # captured
    transpose: float32[2, 4, 3].strides(12, 1, 4) = aten.transpose.int(x, 1, 2)
    cat: float32[2, 4, 3] = aten.cat.default([empty, transpose], 1)
    cat_1: float32[2, 4, 4] = aten.cat.default([none, x, y], 1)
    cat_2: float32[2, 3, 4] = aten.cat.default([empty, h])
    cat_3: float32[0] = aten.cat.default([empty, empty])
    return (cat, cat_1, cat_2, cat_3), ()
"""
    assert_expected_inline(
        after(leave_out_empty_operands, before, name="empty_operands"),
        """\
def joint(
    empty: float32[0],
    none: float32[2, 0, 4].strides(4, 4, 1),
    x: float32[2, 3, 4],
    y: float32[2, 1, 4],
    h: bfloat16[2, 3, 4],
):
    # captured
    transpose: float32[2, 4, 3].strides(12, 1, 4) = aten.transpose.int(x, 1, 2)
    clone_default: float32[2, 4, 3] = aten.clone.default(transpose, memory_format=torch.contiguous_format)
    cat_default_4: float32[2, 4, 4] = aten.cat.default([x, y], 1)
    _to_copy_default: float32[2, 3, 4] = aten._to_copy.default(h, dtype=torch.float32)
    clone_default_1: float32[2, 3, 4] = aten.clone.default(_to_copy_default, memory_format=torch.contiguous_format)
    cat_3: float32[0] = aten.cat.default([empty, empty])
    return (clone_default, cat_default_4, clone_default_1, cat_3), ()
""",
    )


def test_as_text_channels_stay_where_the_empty_operand_has_put_them() -> None:
    """Images alone are joined with channels innermost. Without an empty operand nothing changes."""
    before = """\
def joint(
    empty: float32[0],
    x: float32[2, 3, 4, 4].strides(48, 1, 12, 3),
):
    # captured
    cat: float32[2, 6, 4, 4] = aten.cat.default([empty, x, x], 1)
    cat_1: float32[2, 6, 4, 4].strides(96, 1, 24, 6) = aten.cat.default([x, x], 1)
    return (cat, cat_1), ()
"""
    assert_expected_inline(
        after(leave_out_empty_operands, before, name="empty_operands"),
        """\
def joint(
    empty: float32[0],
    x: float32[2, 3, 4, 4].strides(48, 1, 12, 3),
):
    # captured
    cat_default_2: float32[2, 6, 4, 4].strides(96, 1, 24, 6) = aten.cat.default([x, x], 1)
    permute_default: float32[2, 6, 4, 4].strides(96, 1, 24, 6) = aten.permute.default(cat_default_2, [0, 1, 2, 3])
    clone_default: float32[2, 6, 4, 4] = aten.clone.default(permute_default, memory_format=torch.contiguous_format)
    permute_default_1: float32[2, 6, 4, 4] = aten.permute.default(clone_default, [0, 1, 2, 3])
    cat_1: float32[2, 6, 4, 4].strides(96, 1, 24, 6) = aten.cat.default([x, x], 1)
    return (permute_default_1, cat_1), ()
""",
    )


class Joined(nn.Module):
    """Joins a value with nothing, and reads what needs the order in memory that ``cat`` has."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor], *nothing: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.change, self.nothing = nn.Parameter(torch.randn(6, 6)), change, nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([*self.nothing, self.change(x @ self.weight)], -2)
        return joined.view(-1).cumsum(0).sin().sum()


NOTHING = torch.tensor([])
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(1, 2),
    "heads": lambda x: x.view(2, 4, 5, 2, 3).permute(0, 3, 1, 2, 4),
    "as it is": lambda x: x,
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_values_and_gradients_are_those_of_cat(name: str) -> None:
    model = Joined(CHANGES[name], NOTHING, torch.zeros(0)).double()
    joint = capture_joint(model, torch.randn(2, 4, 5, 6, dtype=torch.float64))
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    joint = leave_out_empty_operands(joint)
    assert not joint.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    for value, reference in zip(run_joint(joint, inputs), expected, strict=True):
        assert (value is None and reference is None) or torch.equal(value, reference)


@pytest.mark.parametrize("name", ["transposed", pytest.param("heads", marks=pytest.mark.long)])
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_stages_have_the_gradients_of_eager(name: str, dynamic: bool) -> None:
    model, x = Joined(CHANGES[name], NOTHING).double(), torch.randn(2, 4, 5, 6, dtype=torch.float64)
    reference = eager_step(model, {"x": x})
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", dynamic=dynamic)
    torch.testing.assert_close(train_step(compiled, compiled, {"x": x}).gradients, reference.gradients)


def _language_model(kind: str, attention: str) -> nn.Module:
    """A model as it is without settings: it keeps keys and values."""
    if kind == "GPT-2":
        gpt2 = transformers.GPT2Config(vocab_size=64, n_layer=1, n_embd=32, n_head=2, attn_implementation=attention)
        return transformers.GPT2LMHeadModel(gpt2)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        attn_implementation=attention,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_inductor_writes_code_for_language_models_with_a_cache(
    kind: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = _language_model(kind, attention)
    assert model.config.use_cache
    tokens = torch.randint(64, (2, 16))
    with caplog.at_level(logging.WARNING):
        plan = roundpipe_fx.compile(model, stage_compiler="inductor").trace(input_ids=tokens, labels=tokens)
    assert plan.peak_bytes and "cannot be read from Inductor's code" not in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["GPT-2", "Llama"])
def test_compiled_language_models_with_a_cache_have_the_gradients_of_eager(kind: str, attention: str) -> None:
    model = _language_model(kind, attention).eval().double()
    tokens = torch.randint(64, (2, 16))
    batch = {"input_ids": tokens, "labels": tokens}
    reference = eager_step(model, batch)
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor")
    torch.testing.assert_close(train_step(compiled, compiled, batch).gradients, reference.gradients)
