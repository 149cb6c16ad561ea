"""Fine-tune a language model that is larger than the GPU: it stays on the host, and each step brings it by stages.

python examples/finetune.py --model FOLDER --data FILE [--device cuda:0] [--lora RANK] [--resume]

FOLDER is what ``save_pretrained`` writes or a snapshot from the Hugging Face Hub, FILE is text. Weights are bfloat16
on the host; AdamW works there on float32 copies, stage by stage beside the backward. With ``--lora`` the weights are
frozen and adapters are trained. OUT gets losses.csv, losses.png, checkpoints that ``--resume`` goes on from with the
same bits, and the trained model (or its adapters) in OUT/model.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import roundpipe_fx


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json, weights and tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="a file of text")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", help="most bytes of the device, such as 20GiB; by default 90 %% of what is free")
    parser.add_argument(
        "--host-budget", help="most bytes of the host, such as 200GiB; by default 80 %% of what is free"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the weights; AdamW works in float32 in any case")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank, all weights frozen")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--microbatches", type=int, default=8, help="parts that a step is divided into")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--warmup", type=int, default=10, help="steps until the full rate, which then falls to 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=200, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in OUT")
    parser.add_argument("--out", type=Path, default=Path("finetuned"))
    return parser.parse_args()


def rows_of(given: argparse.Namespace) -> torch.Tensor:
    """The data as rows of equal length. A folder without a tokenizer is of a model of bytes."""
    text = given.data.read_text()
    try:
        tokens = transformers.AutoTokenizer.from_pretrained(given.model)(text)["input_ids"]
    except (OSError, ValueError):
        tokens = list(text.encode())
    count = len(tokens) // given.length
    if count < given.batch:
        raise SystemExit(
            f"{given.data} has {len(tokens)} tokens: fewer than --batch {given.batch} rows of {given.length}."
        )
    return torch.tensor(tokens[: count * given.length]).view(count, given.length)


def batch_of(rows: torch.Tensor, step: int, given: argparse.Namespace) -> torch.Tensor:
    """The rows of a step, each once an epoch: what they are depends on the seed and the step only."""
    epoch, place = divmod(step, len(rows) // given.batch)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(given.seed + epoch))
    return rows[order[place * given.batch :][: given.batch]]


def load(given: argparse.Namespace) -> Any:
    """The model on the host."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype), use_cache=False
    )
    if given.lora:
        import peft

        model = peft.get_peft_model(
            model, peft.LoraConfig(r=given.lora, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    return model.train()


def trained_state(model: Any) -> dict[str, Any]:
    """What a checkpoint holds of the model: frozen weights are those of the folder."""
    state = model.state_dict()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            state.pop(name, None)
    return state


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint. A disk that is full, or an interrupt, leaves the last one as it is."""
    partial = path.with_suffix(".partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def draw(losses: list[tuple[int, float, float]], folder: Path) -> None:
    with open(folder / "losses.csv", "w", newline="") as file:
        csv.writer(file).writerows([("step", "loss", "tokens a second"), *losses])
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([step for step, *_ in losses], [loss for _, loss, _ in losses])
    axes.set(xlabel="step", ylabel="loss")
    figure.savefig(folder / "losses.png", dpi=120)
    pyplot.close(figure)


def main() -> None:
    given = arguments()
    checkpoint = given.out / "checkpoint.pt"
    if given.resume and not checkpoint.exists():
        raise SystemExit(f"There is no {checkpoint} to resume from.")
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(given.seed)
    rows = rows_of(given)
    own = load(given)
    model = roundpipe_fx.compile(
        own,
        devices=[given.device],
        num_microbatches=given.microbatches,
        memory_budget=given.budget,
        host_budget=given.host_budget,
        optim_dtype=torch.float32,
    )
    with roundpipe_fx.OptimizerCtx():
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, given.rate, fused=True)

    def rate(step: int) -> float:
        return min((step + 1) / given.warmup, (given.steps - step) / max(given.steps - given.warmup, 1))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    begin, losses = 0, []
    if given.resume:
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        begin, losses = state["step"], state["losses"]

    first = batch_of(rows, begin, given)
    print(model.trace(input_ids=first, labels=first, optimizer=optimizer))
    steps = tqdm(range(begin, given.steps), initial=begin, total=given.steps, unit="step")
    for step in steps:
        tokens = batch_of(rows, step, given)
        start = time.perf_counter()
        loss = model.forward_backward(input_ids=tokens, labels=tokens, optimizer=optimizer)
        scheduler.step()
        speed = tokens.numel() / (time.perf_counter() - start)
        losses.append((step, float(loss), speed))
        steps.set_postfix(loss=f"{losses[-1][1]:.4f}", tokens_s=f"{speed:.0f}")
        if (step + 1) % given.save_every == 0 or step + 1 == given.steps:
            state = {"model": trained_state(model), "step": step + 1, "losses": losses, "rng": torch.get_rng_state()}
            state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            save(checkpoint, state)
            draw(losses, given.out)
    own.save_pretrained(given.out / "model")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. --resume goes on from the last checkpoint.") from None
