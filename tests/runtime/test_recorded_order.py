from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime.recorded_order import InRecordedOrder
from roundpipe_fx.torch_private import tree_leaves
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import eager_step, train_step
from tests.long import long_but

NOTHING = torch.tensor([])


def _join(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([NOTHING, x], -2)


# Inductor's decomposition returns the operand's order, where `cat` returns a contiguous tensor.
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "joined": lambda x: _join(x.transpose(0, 1)),
    "joined heads": lambda x: _join(x.view(4, 5, 2, 3).permute(0, 2, 1, 3)),
}


class Viewed(nn.Module):
    """Reads a view that the order in memory of a function's result allows, and that of its operand does not."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(6, 6)), FUNCTIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x @ self.weight).view(-1).cumsum(0).sin().sum()


@pytest.mark.parametrize("name", long_but(FUNCTIONS, quick={"joined"}))
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.long)])
def test_compiled_stages_have_the_gradients_of_eager(name: str, dynamic: bool) -> None:
    model, x = Viewed(name).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    reference = eager_step(model, {"x": x})
    compiled = roundpipe_fx.compile(model, stage_compiler="inductor", dynamic=dynamic)
    torch.testing.assert_close(train_step(compiled, compiled, {"x": x}).gradients, reference.gradients)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inductor_writes_code_for_views(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plan = roundpipe_fx.compile(Viewed(name), stage_compiler="inductor").trace(torch.randn(4, 5, 6))
    assert plan.peak_bytes and "cannot be read from Inductor's code" not in caplog.text


def test_only_results_in_another_order_are_copied() -> None:
    """Values are those of the graph, and in its order: a copy where it was recorded otherwise, else the result."""
    joint = capture_joint(Viewed("joined").double(), torch.randn(4, 5, 6, dtype=torch.float64))
    inputs = example_inputs(joint)
    expected = run_joint(joint, inputs)
    product = next(node for node in joint.computed() if node.target is torch.ops.aten.mm.default)
    product.meta["val"] = product.meta["val"].t().contiguous().t()
    strides: dict[str, tuple[int, ...]] = {}

    class Noted(InRecordedOrder):
        def run_node(self, n: torch.fx.Node) -> object:
            result = super().run_node(n)
            if isinstance(result, torch.Tensor):
                strides[n.name] = result.stride()
            return result

    results = Noted(joint.module).run(*inputs)
    assert strides[product.name] == product.meta["val"].stride() != (6, 1)
    others = {node.name: node.meta["val"].stride() for node in joint.computed() if "val" in node.meta}
    assert all(strides[name] == stride for name, stride in others.items() if name in strides)
    for value, reference in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        assert (value is None and reference is None) or torch.equal(value, reference)


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


@pytest.mark.parametrize(("kind", "attention"), [("GPT-2", "eager"), ("GPT-2", "sdpa"), ("Llama", "eager")])
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
