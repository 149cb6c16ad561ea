"""The same script three ways: as it is, with its own checkpointing switched on, and with one line of ours.

python -m benchmarks.scripts                                   # all
python -m benchmarks.scripts --scripts "plain loop" --ways unmodified "compile(memory_budget=0.0)"

A Llama with 32 K words is trained by a plain loop, by Hugging Face's Trainer, and with LoRA by TRL's SFTTrainer. Each
measurement is a process with one thread. Bytes are the peak of the resident set in a step, the optimizer's included,
beyond that before the step; seconds are those of the processor, the median of steps. Weights, gradients that stay and
the optimizer's state are there before the step and not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import datasets
import peft
import tokenizers
import torch
import transformers
import trl
from torch import nn

import roundpipe_fx
from benchmarks.resident import Peak, in_a_process, keep_freed_memory
from benchmarks.side_by_side import report

_WORDS, _ROWS, _LENGTH = 32768, 4, 256
_WARM, _STEPS = 3, 8
"""Steps before those that are measured: a plan may learn from the first. Then bytes are measured, then seconds."""
_TITLE = "resident MB of a step / processor seconds, one thread"
_CHECKPOINTED = "its checkpointing"
_BUDGETS = {"compile(model)": None, "memory_budget=0.5": 0.5, "memory_budget=0.0": 0.0}
_WAYS = ("unmodified", _CHECKPOINTED, *_BUDGETS)


def _model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_WORDS,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _rows(count: int) -> torch.Tensor:
    return torch.randint(1, _WORDS, (count, _LENGTH), generator=torch.Generator().manual_seed(0))


class _Measured:
    """Measures steps: bytes first, then seconds."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.seconds: list[float] = []
        self._steps = 0

    def begin(self) -> None:
        if self._steps == _WARM + _STEPS // 2:
            keep_freed_memory()
        self._peak, self._begin = Peak(), time.process_time()

    def end(self) -> None:
        seconds, peak = time.process_time() - self._begin, self._peak.bytes()
        self._steps += 1
        if _WARM < self._steps <= _WARM + _STEPS // 2:
            self.bytes.append(peak)
        elif self._steps > _WARM + _STEPS // 2 + 1:
            self.seconds.append(seconds)


def _loop(way: str, measured: _Measured) -> None:
    model = _model()
    if way == _CHECKPOINTED:
        model.gradient_checkpointing_enable()
    run = _compiled(model, way)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = _rows(_ROWS)
    for _ in range(_WARM + 2 * _STEPS):
        measured.begin()
        run(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measured.end()


def _compiled(model: nn.Module, way: str) -> Any:
    return roundpipe_fx.compile(model, memory_budget=_BUDGETS[way]) if way in _BUDGETS else model


class _Callback(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, measured: _Measured) -> None:
        self._measured = measured

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._measured.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._measured.end()


def _settings(folder: str, way: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "max_steps": _WARM + 2 * _STEPS,
        "per_device_train_batch_size": _ROWS,
        "gradient_checkpointing": way == _CHECKPOINTED,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }


def _trainer(way: str, measured: _Measured) -> None:
    rows = [{"input_ids": row, "labels": row} for row in _rows(_ROWS * (_WARM + 2 * _STEPS))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(**_settings(folder, way))
        trainer = transformers.Trainer(
            _compiled(_model(), way), arguments, train_dataset=rows, callbacks=[_Callback(measured)]
        )
        trainer.train()


def _sft(way: str, measured: _Measured) -> None:
    lora = peft.LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM")
    model = peft.get_peft_model(_model(), lora)
    if way in _BUDGETS:
        model.compile(backend="roundpipe_fx", options={"memory_budget": _BUDGETS[way]})
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"_": 0}, "_"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="_", pad_token="_")
    rows = {"input_ids": _rows(_ROWS * (_WARM + 2 * _STEPS)).tolist()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = trl.SFTConfig(**_settings(folder, way), max_length=_LENGTH)
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=tokenizer,
            callbacks=[_Callback(measured)],
        )
        trainer.train()


_SCRIPTS: dict[str, Callable[[str, _Measured], None]] = {
    "plain loop": _loop,
    "Trainer": _trainer,
    "SFTTrainer with LoRA": _sft,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", nargs="*", default=[*_SCRIPTS], choices=[*_SCRIPTS])
    parser.add_argument("--ways", nargs="*", default=[*_WAYS], choices=[*_WAYS])
    parser.add_argument("--one", nargs=2)
    asked = parser.parse_args()
    if asked.one:
        torch.set_num_threads(1)
        script, way = asked.one
        measured = _Measured()
        _SCRIPTS[script](way, measured)
        print(json.dumps({"bytes": max(measured.bytes), "seconds": statistics.median(measured.seconds)}))
        return
    rows: list[dict[str, Any]] = []
    for script in asked.scripts:
        row: dict[str, Any] = {"script": script, **dict.fromkeys(asked.ways, "")}
        for way in asked.ways:
            found = in_a_process("scripts", "--one", script, way)
            row[way] = found if isinstance(found, str) else f"{found['bytes'] / 1e6:.0f} / {found['seconds']:.2f}"
            print(f"{script}, {way}: {row[way]}", file=sys.stderr, flush=True)
        rows.append(row)
    report("scripts", _TITLE, rows)


if __name__ == "__main__":
    main()
