"""Run by torchrun: trains, saves after each step, and goes on from the last checkpoint.

Usage: resumable.py FOLDER [STEP]. In STEP, rank 1 kills itself before its stage's third call, the first time.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import roundpipe_fx

STEPS = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Dying:
    """When this process ends."""

    calls: int | None = None


def _dying(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[..., Any]:
    """A stage compiler whose stages count down to the end of their process."""

    def call(*arguments: Any) -> Any:
        if Dying.calls is not None:
            Dying.calls -= 1
            if Dying.calls == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return module(*arguments)

    return call


def _main(folder: Path, dies_in: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2))
    )
    batches = torch.randn(STEPS, 8, 16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    compiled: Any = roundpipe_fx.compile(model, mesh=mesh, num_microbatches=4, stage_compiler=_dying)
    batch = {"labels": batches[0], "loss_fn": nn.functional.mse_loss}
    compiled.trace(batches[0], **batch)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(compiled, optimizer, options=FLAT)
        return {"model": of_model, "optimizer": of_optimizer, "generator": torch.get_rng_state(), "step": 0}

    first = 0
    latest = max((int(path.name) for path in folder.glob("[0-9]*") if (path / ".metadata").exists()), default=0)
    if latest:
        saved = state()
        dcp.load(saved, checkpoint_id=folder / str(latest))
        set_state_dict(
            compiled, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=FLAT
        )
        torch.set_rng_state(saved["generator"])
        first = latest
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(first, STEPS):
        if step == dies_in and restarts == 0 and dist.get_rank() == 1:
            Dying.calls = 3
        compiled.forward_backward(batches[step], **batch | {"labels": batches[step]})
        optimizer.step()
        optimizer.zero_grad()
        dcp.save(state(), checkpoint_id=folder / str(step + 1))
    (folder / f"finished_{dist.get_rank()}").write_text(f"restarts {restarts}, from step {first}")
    torch.save(dict(compiled.state_dict()), folder / f"weights_{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
