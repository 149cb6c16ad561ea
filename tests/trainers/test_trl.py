"""TRL's SFTTrainer, with LoRA and without: the numbers of the same run without roundpipe_fx."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import tokenizers
import torch
import transformers
import trl
from torch import nn

import roundpipe_fx
from roundpipe_fx.frontend.graph_breaks import GraphBreakWarning


def _plain() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _adapted() -> nn.Module:
    lora = peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, r=2, task_type="CAUSAL_LM")
    return peft.get_peft_model(_plain(), lora)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate("_abcdefg")}, "_"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="_", pad_token="_", unk_token="_")


def _trained(model: nn.Module, folder: Path, **arguments: Any) -> list[tuple[float, float]]:
    settings = trl.SFTConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=3,
        logging_steps=1,
        learning_rate=0.1,
        per_device_train_batch_size=2,
        pad_to_multiple_of=8,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    data = datasets.Dataset.from_dict({"text": ["a b c d", "e f g", "a c e g", "b d f"] * 2})
    trainer = trl.SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=_tokenizer())
    trainer.train()
    return [(entry["loss"], entry["entropy"]) for entry in trainer.state.log_history if "loss" in entry]


def _whole(model: nn.Module) -> nn.Module:
    return roundpipe_fx.compile(model, memory_budget=0.5)


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
    return model


def _inside(model: nn.Module) -> nn.Module:
    model.get_base_model().transformer = roundpipe_fx.compile(model.get_base_model().transformer, memory_budget=0.5)
    return model


@pytest.mark.filterwarnings("ignore")  # of the trainer
@pytest.mark.parametrize(
    ("make", "wrap", "arguments"),
    [
        pytest.param(_adapted, _inside, {"gradient_checkpointing": False}, id="transformer"),
        pytest.param(_adapted, _whole, {"gradient_checkpointing": False}, id="whole"),
        pytest.param(_adapted, _whole, {}, id="whole, checkpointing"),
        pytest.param(_adapted, _in_place, {"gradient_checkpointing": False}, id="in place"),
        pytest.param(_plain, _in_place, {"gradient_checkpointing": False}, id="in place, without adapters"),
        pytest.param(_plain, _in_place, {}, id="in place, without adapters, checkpointing"),
    ],
)
@pytest.mark.long
def test_sft(
    make: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], arguments: dict[str, Any], tmp_path: Path
) -> None:
    eager, model = make(), make()
    expected = _trained(eager, tmp_path / "eager", **arguments)
    compiled = wrap(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert _trained(compiled, tmp_path / "compiled", **arguments) == expected
    assert len({loss for loss, _ in expected}) == 3 and any(plan.training for plan in roundpipe_fx.plans(compiled))
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    names = {path.name for path in (tmp_path / "compiled" / "checkpoint-3").iterdir()}
    assert names & {"adapter_config.json", "model.safetensors"}
    if "gradient_checkpointing" in arguments:  # which breaks graphs: it adds a hook
        assert not any(isinstance(warning.message, GraphBreakWarning) for warning in told)
        assert all(plan.training for plan in roundpipe_fx.plans(compiled))
