"""``--lora`` and ``--quantize``: the plans of PEFT's models, and of frozen weights as integers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.command_line.adapters import Lora, parse_lora
from roundpipe_fx.command_line.main import main
from roundpipe_fx.command_line.quantized_base import KINDS, QuantizedLinear, quantize
from roundpipe_fx.report.plan import Plan

_CONFIG = transformers.LlamaConfig(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    architectures=["LlamaForCausalLM"],
    use_cache=False,
)
_LINEAR = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 256 * 3
"""Weights of the layer, but the head's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    _CONFIG.save_pretrained(path)
    return path


def _plan(folder: Path, *arguments: str) -> Plan:
    file = folder.with_name("plan.json")
    asked = ["plan", str(folder), "--batch", "2", "--sequence", "32", "--device", "H100", "--output", str(file)]
    assert main([*asked, *arguments]) == 0
    return Plan.from_json(file.read_text())


_LORA = ["--lora", "r=4", "--optimizer", "AdamW"]


@pytest.fixture(scope="module")
def with_adapters(folder: Path) -> Plan:
    """The plan of a model with adapters, whose base is whole."""
    return _plan(folder, *_LORA)


@pytest.mark.long
def test_adapters_are_pefts(folder: Path) -> None:
    found = _plan(folder, "--memory-budget", "0.0", "--lora", "r=4,alpha=8,targets=q_proj+up_proj")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_CONFIG)
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
        adapted = peft.get_peft_model(model, lora)
        tokens = torch.empty(2, 32, dtype=torch.long)
    expected = roundpipe_fx.plan(adapted, memory_budget=0.0, device="H100", input_ids=tokens, labels=tokens)
    assert (found.peak_bytes, found.saved_bytes) == (expected.peak_bytes, expected.saved_bytes)
    assert found.recompute_seconds == expected.recompute_seconds > 0


@pytest.mark.long
def test_only_adapters_have_a_state_of_the_optimizer(folder: Path) -> None:
    plan = _plan(folder, "--lora", "r=4,targets=q_proj", "--optimizer", "SGD")
    assert plan.model is not None and plan.model.optimizer == 0
    plan = _plan(folder, "--lora", "r=4,targets=q_proj", "--optimizer", "AdamW")
    assert plan.model is not None
    adapters = 4 * 4 * (64 + 64)
    assert 2 * adapters <= plan.model.optimizer <= 2 * adapters + 2 * 4  # and a counter of steps each


@pytest.mark.parametrize(("kind", "size"), [("nf4", _LINEAR // 2 + 4 * _LINEAR // 64), ("int8", _LINEAR)])
@pytest.mark.quick_every(2)
def test_quantized_weights_take_what_the_libraries_take(
    kind: str, size: int, folder: Path, with_adapters: Plan
) -> None:
    whole = with_adapters.model
    plan = _plan(folder, *_LORA, "--quantize", kind)
    assert whole is not None and plan.model is not None
    rows = 64 * 2 + 32 * 2 + 256 * 2 + 64
    scales = 4 * rows if kind == "int8" else 0
    assert whole.parameters - plan.model.parameters == 4 * _LINEAR - size - scales
    # Numbers that are made of integers are made again in the backward, and never saved.
    assert plan.saved_bytes == with_adapters.saved_bytes
    assert plan.recompute_seconds == 0


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_layers_are_all_but_the_head(kind: str) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(_CONFIG)
    assert quantize(model, kind) == 7
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    assert len(layers) == 7 and not isinstance(model.lm_head, QuantizedLinear)
    assert not any(layer.weight.requires_grad for layer in layers)


@pytest.mark.long
def test_a_quantized_base_fits_where_the_whole_does_not(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["fit", str(folder), "--sequence", "128", "--memory-budget", "1MiB", "--json", "--lora", "r=4"]
    asked += ["--tiling", "never"]  # less to search
    found: list[dict[str, Any]] = []
    for more in ([], ["--quantize", "nf4"]):
        assert main([*asked, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["parameter_bytes"] > 1.2 * found[1]["parameter_bytes"]
    assert found[1]["batch"] >= 1


def test_a_layer_that_is_shared_stays_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, device="meta")
            self.second = self.first

    model = Twice()
    assert quantize(model, "nf4") == 1 and model.first is model.second


def test_lora_is_read() -> None:
    assert parse_lora("r=8") == Lora(rank=8)
    assert parse_lora("targets=all-linear,alpha=32") == Lora(alpha=32, targets="all-linear")
    assert parse_lora("r=2,dropout=0.1,targets=a+b.c") == Lora(rank=2, dropout=0.1, targets=("a", "b.c"))


@pytest.mark.parametrize("text", ["", "r", "r=", "r=x", "r=0", "rank=4", "r=4,r=5", "dropout=1", "alpha=0", "r=4;"])
def test_what_is_no_lora_is_one_line(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", str(folder), "--lora", text])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and "--lora" in error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--quantize", "nf4"], "give --lora too"),
        (["--lora", "targets=nothing"], "--lora: Target modules"),
    ],
)
def test_errors_are_one_line(arguments: list[str], text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and text in error


def test_a_model_that_peft_does_not_know_needs_targets(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "tests.command_line.models:mlp", "--batch", "4", "--device", "H100", "--lora"]
    assert main([*asked, "r=4"]) == 2
    assert "give targets" in capsys.readouterr().err
    assert main([*asked, "r=4,targets=all-linear"]) == 0
