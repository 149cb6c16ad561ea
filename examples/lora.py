"""Train adapters of a frozen model: plan the step without memory first, then train within the planned bytes.

python examples/lora.py [--layers 4] [--width 256] [--steps 10] [--out adapters]

For a base model with quantized weights, and a GPU that this machine does not have:
roundpipe-fx fit CONFIG --lora r=16,targets=all-linear --quantize nf4 --optimizer AdamW --device "RTX 4090".
"""

from __future__ import annotations

import argparse

import peft
import torch
import transformers

import roundpipe_fx


def adapted(layers: int, width: int) -> peft.PeftModel:
    """A small Llama whose linear layers have adapters of rank 8; nothing else is trained."""
    config = transformers.LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=width // 32,
        vocab_size=4096,
        use_cache=False,
    )
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    assert isinstance(model, peft.PeftModel)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", help="a folder for the adapters")
    given = parser.parse_args()

    with torch.device("meta"):  # takes no memory
        model = adapted(given.layers, given.width)
        tokens = torch.empty(given.rows, given.length, dtype=torch.long)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    planned = roundpipe_fx.plan(
        model, memory_budget=0.3, device="cpu", optimizer=torch.optim.AdamW(trained), input_ids=tokens, labels=tokens
    )
    print(planned)

    torch.manual_seed(0)
    model = adapted(given.layers, given.width)
    compiled = roundpipe_fx.compile(model, memory_budget=planned.peak_bytes, stage_compiler="eager")
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)
    tokens = torch.randint(4096, (given.rows, given.length))
    for step in range(given.steps):
        with roundpipe_fx.measure_peak("cpu") as peak:
            loss = compiled(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}, peak {peak.bytes:,} of {planned.peak_bytes:,} planned bytes")
    if given.out is not None:
        model.save_pretrained(given.out)


if __name__ == "__main__":
    main()
