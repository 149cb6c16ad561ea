"""Fine-tune a language model with Hugging Face's Trainer, within a memory budget: one additional line.

python examples/finetune_with_trainer.py [--model FOLDER] [--text FILE] [--budget 2GiB]

Without a FOLDER, a small GPT-2 with random weights is trained; without a FILE, the text is Python's own help.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
import transformers

import roundpipe_fx


def blocks_of(text: str, tokenizer: transformers.PreTrainedTokenizerBase | None, length: int) -> list[dict[str, list]]:
    """Equal blocks of tokens; without a tokenizer, a token is a byte."""
    tokens = tokenizer(text)["input_ids"] if tokenizer else list(text.encode())
    starts = range(0, len(tokens) - length, length)
    return [{"input_ids": tokens[at : at + length], "labels": tokens[at : at + length]} for at in starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder that save_pretrained has written")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--budget", default="6MiB", help="what a step may take beyond the model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("finetuned"))
    given = parser.parse_args()

    if given.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(given.model, use_cache=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    else:
        torch.manual_seed(0)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, use_cache=False, **ends)
        model, tokenizer = transformers.GPT2LMHeadModel(config), None
    text = given.text.read_text() if given.text else "\n".join(pydoc_data.topics.topics.values())

    model = roundpipe_fx.compile(model, memory_budget=given.budget)

    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            given.out,
            max_steps=given.steps,
            per_device_train_batch_size=given.batch,
            learning_rate=1e-3,
            logging_steps=max(1, given.steps // 5),
            report_to=[],
        ),
        train_dataset=blocks_of(text, tokenizer, given.length),
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    trainer.save_model()
    print(model.plan)


if __name__ == "__main__":
    main()
