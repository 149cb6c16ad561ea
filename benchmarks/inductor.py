"""Physical bytes and seconds of a step with stages compiled by Inductor, beside ``torch.compile``.

python -m benchmarks.inductor                                  # all: takes long
python -m benchmarks.inductor --models GPT-2 "Llama, 32 K words"
python -m benchmarks.inductor --ways torch.compile "ours 0.0"

Each measurement is a process with one thread. Bytes are the peak of the resident set beyond that before the step, with
an allocator that returns what is freed at once; ours have those of the plan in brackets. Seconds are those of the
processor, the median of steps with an allocator that keeps it; the last figure is those of the first step, which
compiles with one thread and nothing from the disk. Three ways have for their budget the bytes that
``torch.compile`` was measured to need with a budget of 0.5, 0.2 and 0.05.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._functorch import config as functorch_config
from transformers.modeling_outputs import ImageClassifierOutput

import roundpipe_fx
from benchmarks.models import UNet
from benchmarks.resident import Peak, cpu_seconds, in_a_process, keep_freed_memory
from benchmarks.side_by_side import RESULTS, Case, build, checkpoint_blocks, report, step
from benchmarks.side_by_side import cases as small_vocabularies

_SMALL, _LARGE = 1024, 32768
FIGURES = "resident MB (planned) / processor seconds of a step / processor seconds of the first step, one thread"

Way = Callable[[nn.Module, Case], Callable[..., Any]]


def compiled_by_torch(budget: float = 1.0) -> Way:
    """``torch.compile``, with a budget for what is saved."""

    def way(model: nn.Module, _: Case) -> Callable[..., Any]:
        functorch_config.activation_memory_budget = budget
        return torch.compile(model)

    return way


def compiled_by_us(budget: float | int | None) -> Way:
    """Ours, with stages that Inductor compiles."""
    return lambda model, _: roundpipe_fx.compile(model, memory_budget=budget, stage_compiler="inductor")


def checkpointed(compiled: bool) -> Way:
    """A checkpoint around each block, as people write it by hand."""

    def way(model: nn.Module, case: Case) -> Callable[..., Any]:
        checkpoint_blocks(model, case.blocks)
        return torch.compile(model) if compiled else model

    return way


WAYS: dict[str, Way] = {
    "checkpoint per block": checkpointed(compiled=False),
    "checkpoint per block, compiled": checkpointed(compiled=True),
    "torch.compile": compiled_by_torch(),
    "torch.compile 0.5": compiled_by_torch(0.5),
    "torch.compile 0.2": compiled_by_torch(0.2),
    "torch.compile 0.05": compiled_by_torch(0.05),
    "ours": compiled_by_us(None),
    "ours, as 0.5": compiled_by_us(None),
    "ours, as 0.2": compiled_by_us(None),
    "ours, as 0.05": compiled_by_us(None),
    "ours 0.0": compiled_by_us(0.0),
}
"""Ways to compile a model; the number in a name is the memory budget."""
_SAME_BYTES = {f"ours, as {budget}": f"torch.compile {budget}" for budget in ("0.5", "0.2", "0.05")}
"""Ways whose budget is the bytes that another one was measured to need."""


class _DropoutMLP(nn.Module):
    """Blocks of a norm, two layers and dropout."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(4 * width, width),
                nn.Dropout(0.1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        x = pixel_values
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        loss: Any = F.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


class _LossAlone(nn.Module):
    """A model that returns its loss, and no scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> Any:
        return ImageClassifierOutput(loss=self.model(**batch).loss)


def _text_cases() -> list[Case]:
    layers, width, heads, inner = 4, 256, 4, 1024
    decoder: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "intermediate_size": inner,
        "use_cache": False,
    }

    def gpt2(words: int) -> nn.Module:
        config = transformers.GPT2Config(vocab_size=words, n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
        return transformers.GPT2LMHeadModel(config)

    def llama(words: int) -> nn.Module:
        config = transformers.LlamaConfig(**decoder, vocab_size=words, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config)

    def qwen3(words: int) -> nn.Module:
        config = transformers.Qwen3Config(**decoder, vocab_size=words, head_dim=width // heads)
        return transformers.Qwen3ForCausalLM(config)

    def opt(words: int) -> nn.Module:
        config = transformers.OPTConfig(
            vocab_size=words,
            hidden_size=width,
            word_embed_proj_dim=width,
            ffn_dim=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            use_cache=False,
        )
        return transformers.OPTForCausalLM(config)

    def bert(words: int) -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=words,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=inner,
        )
        return transformers.BertForMaskedLM(config)

    decoders = "model.layers.{}"

    def gemma2(words: int) -> nn.Module:
        config = transformers.Gemma2Config(**decoder, vocab_size=words, head_dim=width // heads)
        return transformers.Gemma2ForCausalLM(config)

    models: dict[str, tuple[Callable[[int], nn.Module], str]] = {
        "GPT-2": (gpt2, "transformer.h.{}"),
        "Llama": (llama, decoders),
        "Qwen3": (qwen3, decoders),
        "Gemma-2": (gemma2, decoders),
        "OPT": (opt, "model.decoder.layers.{}"),
        "BERT": (bert, "bert.encoder.layer.{}"),
    }
    cases = []
    for name, (make, blocks) in models.items():
        names = tuple(blocks.format(layer) for layer in range(layers))
        for words, batch in ((_SMALL, 8), (_LARGE, 4)):
            case = Case(
                f"{name}, {words // 1024} K words",
                lambda make=make, words=words: make(words),  # type: ignore[misc]
                lambda words=words, batch=batch: tokens(words, batch, 256),  # type: ignore[misc]
                names,
                "",
            )
            cases.append(case)
    (large,) = (case for case in cases if case.name == f"Llama, {_LARGE // 1024} K words")
    inside = tuple(f"model.{name}" for name in large.blocks)
    alone = dataclasses.replace(
        large, name=f"{large.name}, loss alone", make=lambda: _LossAlone(large.make()), blocks=inside
    )
    narrow = dataclasses.replace(large, name=f"{large.name}, bf16", make=lambda: large.make().to(torch.bfloat16))
    return [*cases, alone, narrow]


def tokens(words: int, batch: int, length: int) -> dict[str, Any]:
    """A batch of random tokens."""
    drawn = torch.randint(words, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": drawn, "labels": drawn}


def _images(*shape: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(*shape, generator=generator),
        "labels": torch.randint(10, shape[:1], generator=generator),
    }


def cases() -> list[Case]:
    """The models, with random weights."""
    depth = 3
    others = {"T5", "ViT", "ResNet", "Qwen3-MoE bf16"}
    unet_blocks = (*(f"down.{i}" for i in range(depth + 1)), *(f"up.{i}" for i in range(depth)))
    return [
        *_text_cases(),
        Case("U-Net", lambda: UNet(16, depth), lambda: _images(8, 3, 64, 64), unet_blocks, ""),
        Case(
            "MLP with dropout",
            lambda: _DropoutMLP(6, 256),
            lambda: _images(4096, 256),
            tuple(f"blocks.{i}" for i in range(6)),
            "",
        ),
        *(case for case in small_vocabularies(layers=4, width=256, length=256) if case.name in others),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    by_name = {case.name: case for case in cases()}
    parser.add_argument("--models", nargs="*", default=[*by_name], choices=[*by_name], metavar="MODEL")
    parser.add_argument("--ways", nargs="*", default=[*WAYS], choices=[*WAYS], metavar="WAY")
    parser.add_argument("--one", nargs=2)
    parser.add_argument("--bytes", type=int)
    asked = parser.parse_args()
    if asked.one:
        name, way = asked.one
        print(json.dumps(measured(by_name[name], compiled_by_us(asked.bytes) if asked.bytes else WAYS[way])))
        return
    rows = {row["model"]: row for row in _stored()}
    for name in asked.models:
        rows[name] = _row(name, asked.ways)
        report("inductor", FIGURES, [rows[name] for name in by_name if name in rows])


def _stored() -> list[dict[str, Any]]:
    """Rows of earlier runs: a model's ways are all measured in one."""
    path = RESULTS / "inductor.json"
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return rows


def _row(name: str, ways: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, **dict.fromkeys(WAYS, "")}
    sizes: dict[str, int] = {}
    for way in ways:
        arguments = ["--one", name, way]
        if way in _SAME_BYTES:
            if _SAME_BYTES[way] not in sizes:
                continue
            arguments += ["--bytes", str(sizes[_SAME_BYTES[way]])]
        found = in_a_process("inductor", *arguments)
        if not isinstance(found, str):
            sizes[way] = found["bytes"]
        row[way] = found if isinstance(found, str) else cell(**found)
        print(f"{name}, {way}: {row[way]}", file=sys.stderr, flush=True)
    return row


def cell(bytes: int, planned: int | None, seconds: float, first: float) -> str:
    """The figures of a measurement as text.

    Args:
        bytes: of the peak.
        planned: those of the plan, if there is one.
        seconds: processor seconds of a step.
        first: those of the first one, and of the compilers that it starts.
    """
    of_plan = "" if planned is None else f" ({planned / 1e6:.0f})"
    return f"{bytes / 1e6:.0f}{of_plan} / {seconds:.3g} / {first:.0f}"


def measured(case: Case, way: Way) -> dict[str, Any]:
    """Peak and planned bytes, processor seconds of a step and of the first one, in this process.

    Args:
        case: the model and its batch.
        way: how it is compiled.
    """
    torch.set_num_threads(1)
    model, batch = build(case), case.make_batch()
    run = way(model, case)
    begin = cpu_seconds()
    step(run, model, batch)
    first = cpu_seconds() - begin
    # Plans may learn from the first steps: what a step needs is measured once none was made in it.
    known = -1
    while known != _count_plans(run):
        known = _count_plans(run)
        step(run, model, batch)
    for _ in range(2):
        model.zero_grad()
        resident = Peak()
        step(run, model, batch)
        peak = resident.bytes()
    keep_freed_memory()
    seconds = []
    for _ in range(8):
        begin = time.process_time()
        step(run, model, batch)
        seconds.append(time.process_time() - begin)
    planned = run.plan.peak_bytes if isinstance(run, roundpipe_fx.CompiledModule) else None
    return {"bytes": peak, "planned": planned, "seconds": statistics.median(seconds[1:]), "first": first}


def _count_plans(run: Callable[..., Any]) -> int:
    return len(run.plans) if isinstance(run, roundpipe_fx.CompiledModule) else 0


if __name__ == "__main__":
    main()
