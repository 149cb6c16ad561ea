"""Hugging Face's Trainer, Accelerate and PEFT: the numbers of the same run without roundpipe_fx."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
import transformers
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import nn

import roundpipe_fx
from tests.comparison import assert_bitwise, train_step

Wrap = Callable[[nn.Module], nn.Module]


def _gpt2() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)


def _texts() -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (8, 12))]


def _trainer(model: nn.Module, folder: Path, **arguments: Any) -> transformers.Trainer:
    settings = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        **arguments,
    )
    return transformers.Trainer(model=model, args=settings, train_dataset=_texts(), eval_dataset=_texts()[:4])


def _losses(trainer: transformers.Trainer) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.state_dict().values(), second.state_dict().values()))


def _check_ready_to_push(trainer: transformers.Trainer, eager: nn.Module, folder: Path) -> None:
    """What ``push_to_hub`` would upload is what it would be of the eager model, with a card."""
    trainer.save_model(str(folder / "pushed"))
    trainer.args.output_dir = str(folder / "pushed")
    trainer.create_model_card(model_name="tiny", dataset="bytes")
    eager.save_pretrained(folder / "expected")
    for expected in (folder / "expected").iterdir():
        assert (folder / "pushed" / expected.name).read_bytes() == expected.read_bytes(), expected.name
    assert {own.name for own in (folder / "expected").iterdir()} >= {"config.json", "model.safetensors"}
    assert "tiny" in (folder / "pushed" / "README.md").read_text()
    assert (folder / "pushed" / "training_args.bin").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        pytest.param({"bf16": True}, marks=pytest.mark.long),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.long),
        pytest.param({"label_smoothing_factor": 0.1}, marks=pytest.mark.long),
    ],
    ids=["float32", "bf16", "checkpointing", "label smoothing"],
)
@pytest.mark.long
def test_trainer(arguments: dict[str, Any], tmp_path: Path) -> None:
    eager, model = _gpt2(), _gpt2()
    reference = _trainer(eager, tmp_path / "eager", **arguments)
    reference.train()
    compiled = roundpipe_fx.compile(model, memory_budget=0.5)
    trainer = _trainer(compiled, tmp_path / "compiled", **arguments)
    trainer.train()
    assert _losses(trainer) == _losses(reference) and len(_losses(trainer)) == 6
    assert _same_weights(model, eager) and compiled.plan.training
    saved = tmp_path / "compiled" / "checkpoint-4"
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = transformers.GPT2LMHeadModel.from_pretrained(saved)
    assert _same_weights(again, eager) and again.lm_head.weight is again.transformer.wte.weight
    _check_ready_to_push(trainer, eager, tmp_path)
    resumed = _gpt2()
    trainer = _trainer(roundpipe_fx.compile(resumed, memory_budget=0.5), tmp_path / "resumed", **arguments)
    trainer.train(resume_from_checkpoint=str(tmp_path / "compiled" / "checkpoint-2"))
    assert _same_weights(resumed, eager)


@pytest.mark.long
def test_trainer_with_microbatches(tmp_path: Path) -> None:
    """The Trainer gives the model the number of items in the batch, which the model divides its sum by."""
    eager, model = _gpt2(), _gpt2()
    reference = _trainer(eager, tmp_path / "eager")
    reference.train()
    compiled = roundpipe_fx.compile(model, num_microbatches=2)
    trainer = _trainer(compiled, tmp_path / "compiled")
    trainer.train()
    torch.testing.assert_close(_losses(trainer), _losses(reference))
    # AdamW's steps hardly depend on the scale of gradients, their norms do.
    norms = [[log["grad_norm"] for log in own.state.log_history if "grad_norm" in log] for own in (trainer, reference)]
    assert len(norms[0]) == 4  # logged each step; evaluations have none
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-5)
    assert compiled.plan.pipeline is not None and compiled.plan.pipeline.loss_reduction == "sum"


class _Sentences(torch.utils.data.Dataset):
    """Rows of tokens with a class each."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (8,), generator=torch.Generator().manual_seed(place))
        return {"input_ids": tokens, "labels": tokens.sum() % 3}


@pytest.mark.long
def test_trainer_with_microbatches_of_a_model_that_ignores_the_count(tmp_path: Path) -> None:
    """The Trainer passes the number of items to models whose loss is a plain mean as well."""
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    torch.manual_seed(0)
    eager = transformers.BertForSequenceClassification(config)
    model = copy.deepcopy(eager)
    logs = []
    for own in (eager, roundpipe_fx.compile(model, num_microbatches=4)):
        arguments = transformers.TrainingArguments(
            tmp_path, max_steps=3, per_device_train_batch_size=8, logging_steps=1, report_to=[], use_cpu=True
        )
        trainer = transformers.Trainer(own, arguments, train_dataset=_Sentences())
        trainer.train()
        logs.append([(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log])
    assert len(logs[0]) == 3
    torch.testing.assert_close(logs[1], logs[0], rtol=1e-3, atol=0)


def _accelerated(wrap: Wrap, prepare_first: bool) -> tuple[list[float], nn.Module]:
    model = _gpt2()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(_texts(), batch_size=2)
    prepared, optimizer, loader = accelerator.prepare(model if prepare_first else wrap(model), optimizer, loader)
    if prepare_first:
        prepared = wrap(prepared)
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert isinstance(accelerator.unwrap_model(prepared), transformers.GPT2LMHeadModel)
    return losses, model


@pytest.mark.parametrize("prepare_first", [False, True])
def test_accelerator(prepare_first: bool) -> None:
    losses, model = _accelerated(lambda model: model, prepare_first)
    compiled: list[Any] = []

    def wrap(model: nn.Module) -> nn.Module:
        compiled.append(roundpipe_fx.compile(model, memory_budget=0.5))
        return compiled[0]

    found, own = _accelerated(wrap, prepare_first)
    assert found == losses and _same_weights(own, model) and compiled[0].plan.training


def test_plans_of_a_model_in_place_whose_forward_accelerate_has_wrapped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
    # As ``Accelerator(mixed_precision="bf16").prepare`` does; its state cannot be changed in a process.
    under_autocast = torch.autocast("cpu", dtype=torch.bfloat16)(nn.Sequential.forward)
    model.forward = types.MethodType(convert_outputs_to_fp32(under_autocast), model)  # type: ignore[method-assign]
    model(torch.randn(4, 8)).mean().backward()
    (plan,) = roundpipe_fx.plans(model)
    assert plan.training


def _adapted() -> nn.Module:
    torch.manual_seed(2)
    model = peft.get_peft_model(_gpt2(), peft.LoraConfig(target_modules=["c_attn"], r=2, task_type="CAUSAL_LM"))
    with torch.no_grad():  # as if it had been trained: at first one half of each adapter is zero
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return model


def test_peft(tmp_path: Path) -> None:
    batch = {name: value[None] for name, value in _texts()[0].items()}
    model = _adapted()
    expected = train_step(lambda **given: model(**given).loss, model, batch)
    compiled = roundpipe_fx.compile(model, memory_budget=0.5, stages=["base_model.model.transformer.ln_f"])
    assert_bitwise(train_step(lambda **given: compiled(**given).loss, model, batch), expected)
    names = dict(model.named_modules())
    stages = compiled.plan.stages
    assert len(stages) == 2 and all(own in names for stage in stages for own in stage.modules.split(" … "))
    assert "__dict__" not in str(compiled.plan)
    assert "base_model.model.transformer.h.0" in str(compiled.plan.explain("base_model.model.transformer.h.0"))
    compiled.save_pretrained(tmp_path)
    assert isinstance(compiled, peft.PeftModel) and (tmp_path / "adapter_config.json").exists()
    merged = copy.deepcopy(compiled).merge_and_unload()
    assert type(merged) is transformers.GPT2LMHeadModel
