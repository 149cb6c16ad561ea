"""What the benchmarks share: models with their blocks, peers, paired timing, tables and result files."""

from __future__ import annotations

import json
import platform
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.models import ExpertTransformer, UNet
from roundpipe_fx.analysis.cost import DEVICES

RESULTS = Path(__file__).parent / "results"
VOCABULARY = 1024

console = Console(width=130)
transformers.logging.set_verbosity_error()


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, and where people place checkpoints in it."""

    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[], dict[str, Any]]
    blocks: tuple[str, ...]
    tail: str
    """The module that begins after the last block."""


def _tokens(batch: int, length: int) -> dict[str, Any]:
    tokens = torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def _images(batch: int, size: int = 64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "pixel_values": torch.randn(batch, 3, size, size, generator=generator),
        "labels": torch.randint(10, (batch,), generator=generator),
    }


def cases(layers: int = 6, width: int = 128, batch: int = 8, length: int = 128) -> list[Case]:
    """Hugging Face models with random weights, dropout as they come."""
    heads = 4
    common = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}

    def gpt2() -> nn.Module:
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**common, n_layer=layers, n_embd=width, n_head=heads, use_cache=False)
        )

    def qwen3_moe() -> nn.Module:
        config = transformers.Qwen3MoeConfig(
            **common,
            hidden_size=width,
            intermediate_size=2 * width,
            moe_intermediate_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            head_dim=width // heads,
            num_experts=8,
            num_experts_per_tok=2,
            use_cache=False,
        )
        return transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)

    def bert() -> nn.Module:
        config = transformers.BertConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        return transformers.BertForMaskedLM(config)

    def t5() -> nn.Module:
        config = transformers.T5Config(
            vocab_size=VOCABULARY,
            num_layers=layers // 2,
            d_model=width,
            d_ff=4 * width,
            d_kv=width // heads,
            num_heads=heads,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)

    def vit() -> nn.Module:
        config = transformers.ViTConfig(
            image_size=64,
            patch_size=8,
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            num_labels=10,
        )
        return transformers.ViTForImageClassification(config)

    def resnet() -> nn.Module:
        config = transformers.ResNetConfig(
            embedding_size=32, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="basic", num_labels=10
        )
        return transformers.ResNetForImageClassification(config)

    half = layers // 2
    text = lambda: _tokens(batch, length)  # noqa: E731
    return [
        Case("GPT-2", gpt2, text, tuple(f"transformer.h.{i}" for i in range(layers)), "transformer.ln_f"),
        Case("Qwen3-MoE bf16", qwen3_moe, text, tuple(f"model.layers.{i}" for i in range(layers)), "model.norm"),
        Case("BERT", bert, text, tuple(f"bert.encoder.layer.{i}" for i in range(layers)), "cls"),
        Case(
            "T5",
            t5,
            text,
            (*(f"encoder.block.{i}" for i in range(half)), *(f"decoder.block.{i}" for i in range(half))),
            "decoder.final_layer_norm",
        ),
        Case("ViT", vit, lambda: _images(batch), tuple(f"vit.layers.{i}" for i in range(layers)), "vit.layernorm"),
        Case(
            "ResNet",
            resnet,
            lambda: _images(batch),
            tuple(f"resnet.encoder.stages.{i}.layers.{j}" for i in range(3) for j in range(2)),
            "resnet.pooler",
        ),
    ]


def heavy_cases(layers: int = 4) -> list[Case]:
    """The models of the frontier: what their training step saves outweighs their parameters."""
    text = cases(layers=layers, width=256, batch=8, length=256)
    images = cases(layers=layers, width=256, batch=32)
    by_name = {case.name: case for case in text} | {
        case.name: case for case in images if case.name in ("ViT", "ResNet")
    }

    def llama() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return transformers.LlamaForCausalLM(config)

    tokens = lambda: _tokens(8, 256)  # noqa: E731
    depth = 3
    return [
        by_name["GPT-2"],
        Case("Llama", llama, tokens, tuple(f"model.layers.{i}" for i in range(layers)), "model.norm"),
        Case(
            "mixture of experts",
            lambda: ExpertTransformer(VOCABULARY, layers, 128),
            tokens,
            tuple(f"blocks.{i}" for i in range(layers)),
            "norm",
        ),
        by_name["BERT"],
        by_name["T5"],
        by_name["ViT"],
        Case(
            "U-Net",
            lambda: UNet(16, depth),
            lambda: _images(8),
            (*(f"down.{i}" for i in range(depth + 1)), *(f"up.{i}" for i in range(depth))),
            "head",
        ),
        by_name["ResNet"],
    ]


def build(case: Case) -> nn.Module:
    """The case's model, always with the same weights, in training mode."""
    torch.manual_seed(0)
    return case.make().train()


def checkpoint_blocks(model: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """Place ``torch.utils.checkpoint`` around the named modules, as people do by hand."""
    for name in names:
        block = model.get_submodule(name)
        block.forward = _checkpointed(block.forward)
    return model


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def step(run: Callable[..., Any], model: nn.Module, batch: Mapping[str, Any], seed: int = 0) -> float:
    """One training step from no gradients; returns the loss."""
    model.zero_grad()
    torch.manual_seed(seed)
    loss = run(**batch).loss
    loss.backward()
    return loss.item()


def seconds_of(run: Callable[[], Any]) -> float:
    """How long a run takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired(clocks: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 3) -> list[dict[str, float]]:
    """Seconds by each clock, round after round; what warms up is left out.

    Each runs twice in a row and the second time counts, as in a loop of its own: what another one has just freed or
    pushed out of caches costs nobody.
    """
    for clock in clocks.values():
        for _ in range(warm_up):
            clock()
    return [{name: (clock(), clock())[1] for name, clock in clocks.items()} for _ in range(rounds)]


def paired_ratio(
    first: Callable[[], Any], second: Callable[[], Any], pairs: int, warm_up: int = 3
) -> tuple[float, float, float]:
    """Median of ``seconds(first) / seconds(second)`` over alternating pairs, and both medians in seconds."""
    rounds = paired({"first": lambda: seconds_of(first), "second": lambda: seconds_of(second)}, pairs, warm_up)
    return (
        statistics.median(took["first"] / took["second"] for took in rounds),
        statistics.median(took["first"] for took in rounds),
        statistics.median(took["second"] for took in rounds),
    )


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for heading in rows[0]:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def rates_of(*devices: str) -> str:
    """Rates that plans for devices assume, with the tables that they are from."""
    texts = []
    for name in devices:
        rates = DEVICES[name]
        texts.append(
            f"{rates.rates}: {rates.flops[torch.bfloat16] / 1e12:.3g} TFLOP/s in half precision, "
            f"{rates.bandwidth / 1e9:,.0f} GB/s of memory, {rates.host / 1e9:.0f} GB/s to the host and from it"
        )
    return "; ".join(texts)


def report(name: str, title: str, rows: list[dict[str, Any]], rates: str | None = None) -> None:
    """Print a table and write it, with the machine's description, to ``benchmarks/results/``.

    Args:
        name: of the file.
        title: of the table.
        rows: the table.
        rates: those that modelled figures assume; ``None``: no figure is modelled for a device.
    """
    show(title, rows)
    RESULTS.mkdir(exist_ok=True)
    machine = {
        "machine": platform.platform(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    assumed = {} if rates is None else {"rates": rates}
    text = json.dumps({"title": title, **machine, **assumed, "rows": rows}, indent=1)
    (RESULTS / f"{name}.json").write_text(text + "\n")


def give_own_code(model: nn.Module) -> None:
    """Give a model a class with a code object of its own: Dynamo tries all that it has compiled for a code object."""
    kind: Any = type(model)
    forward = kind.forward
    copied = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, "forward", forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    model.__class__ = type(kind.__name__, (kind,), {"forward": copied})


def fresh(items: list[Any]) -> Iterator[Any]:
    """Iterate with Dynamo's caches emptied before each item."""
    for item in items:
        torch._dynamo.reset()
        yield item
