"""Fine-tune a language model that is larger than the GPU: it stays on the host, and is copied stage by stage.

python examples/finetune.py --model FOLDER --data FILE [--device cuda:0] [--lora RANK] [--resume]

FOLDER is a folder that ``save_pretrained`` has written, or a snapshot from the Hugging Face Hub; FILE is a text file.
Weights are bfloat16 on the host, where AdamW updates float32 copies of them, stage by stage during the backward. With
``--lora`` the weights are frozen and adapters are trained. The folder OUT receives losses.csv, losses.png, the trained
model (or its adapters) in OUT/model, and checkpoints from which ``--resume`` continues with the same bits. A checkpoint
is copied between two steps and written during the next ones; if the host has no memory for the copy, training waits
until the checkpoint is written.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import time
import warnings
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import matplotlib
import psutil
import torch
import torch.distributed.checkpoint as dcp
import transformers
from matplotlib import pyplot
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

import roundpipe_fx

matplotlib.use("agg")


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


class Checkpoints:
    """Folders OUT/checkpoint-STEP, the last of which is kept. One that is whole has a file .metadata, written last."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._writing: tuple[Path, Future[Any]] | None = None

    def whole(self) -> list[Path]:
        """Those that can be resumed from, oldest first."""
        found = [file.parent for file in self._out.glob("checkpoint-*/.metadata")]
        return sorted(found, key=lambda folder: int(folder.name.rpartition("-")[2]))

    def begin(self, step: int, state: dict[str, Any]) -> None:
        """Copy a state, and write it beside what follows; without memory for a copy, write it now."""
        failed = self.finish()
        if failed:
            tqdm.write(failed)
        folder = self._out / f"checkpoint-{step}"
        size = sum(value.nbytes for value in tree_leaves(state) if isinstance(value, torch.Tensor))
        if size < 0.8 * psutil.virtual_memory().available:
            self._writing = folder, dcp.async_save(state, checkpoint_id=folder, no_dist=True)
            return
        written: Future[Any] = Future()
        try:
            written.set_result(dcp.save(state, checkpoint_id=folder, no_dist=True))
        except (Exception, dcp.CheckpointException) as error:  # which is no Exception
            written.set_exception(error)
        self._writing = folder, written

    def finish(self) -> str | None:
        """Wait until it is written, and remove the one before. If that fails, as on a full disk, the one before stays.

        Returns:
            why it failed.
        """
        if self._writing is None:
            return None
        folder, writing = self._writing
        error = writing.exception()  # an interrupt here leaves it to be waited for
        self._writing = None
        if error is not None:
            shutil.rmtree(folder, ignore_errors=True)
            return f"{folder} was not written, and the checkpoint before is kept: {cause_of(error)}"
        for older in self.whole()[:-1]:
            shutil.rmtree(older)
        return None


def cause_of(error: BaseException) -> BaseException:
    """What came first, such as that the disk is full: other errors follow from it while the file is closed."""
    if isinstance(error, dcp.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    while error.__context__ is not None:
        error = error.__context__
    return error


def draw(losses: list[tuple[int, float, float]], folder: Path) -> None:
    with open(folder / "losses.csv.new", "w", newline="") as file:
        csv.writer(file).writerows([("step", "loss", "tokens a second"), *losses])
    os.replace(file.name, folder / "losses.csv")  # an interrupt leaves the table before
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot([step for step, *_ in losses], [loss for _, loss, _ in losses])
    axes.set(xlabel="step", ylabel="loss")
    figure.savefig(folder / "losses.png", dpi=120)
    pyplot.close(figure)


class Interrupts:
    """Ctrl-C raises, and is noted: torch.compile may drop what is raised while it checks guards, seen with 2.13."""

    def __init__(self) -> None:
        self._noted = False
        signal.signal(signal.SIGINT, self._note)

    def _note(self, *_: Any) -> None:
        self._noted = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise anew what was dropped."""
        if self._noted:
            raise KeyboardInterrupt


def main() -> None:
    given = arguments()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    checkpoints = Checkpoints(given.out)
    if given.resume and not checkpoints.whole():
        raise SystemExit(f"There is no checkpoint in {given.out} to resume from.")
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

    def state_at(step: int) -> dict[str, Any]:
        copies = {name: copy.detach() for name, copy in model.optim_named_parameters()}
        weights = {"model": trained_state(model), "copies": copies, "optimizer": optimizer.state_dict()}
        of_run = {"step": step, "losses": losses, "rng": torch.get_rng_state()}
        return {**weights, **of_run, "scheduler": scheduler.state_dict()}

    if given.resume:
        with roundpipe_fx.OptimizerCtx():
            get_optimizer_state_dict(model, optimizer)  # gives it a state, into which is read
        state = state_at(0)
        dcp.load(state, checkpoint_id=checkpoints.whole()[-1], no_dist=True)
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["rng"])
        begin, losses = state["step"], state["losses"]

    first = batch_of(rows, begin, given)
    print(model.trace(input_ids=first, labels=first, optimizer=optimizer))
    steps = tqdm(range(begin, given.steps), initial=begin, total=given.steps, unit="step")
    interrupts = Interrupts()
    for step in steps:
        interrupts.check()
        tokens = batch_of(rows, step, given)
        start = time.perf_counter()
        loss = model.forward_backward(input_ids=tokens, labels=tokens, optimizer=optimizer)
        scheduler.step()
        speed = tokens.numel() / (time.perf_counter() - start)
        losses.append((step, float(loss), speed))
        steps.set_postfix(loss=f"{losses[-1][1]:.4f}", tokens_s=f"{speed:.0f}")
        if (step + 1) % given.save_every == 0 or step + 1 == given.steps:
            checkpoints.begin(step + 1, state_at(step + 1))
            try:
                draw(losses, given.out)
            except OSError as error:
                tqdm.write(f"losses were not drawn: {error}")
    interrupts.check()
    failed = checkpoints.finish()
    own.save_pretrained(given.out / "model")
    if failed:
        raise SystemExit(failed)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("Interrupted. --resume goes on from the last checkpoint.") from None
