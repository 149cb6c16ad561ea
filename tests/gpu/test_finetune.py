"""The recipe for models that are larger than the GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.hugging_face import small_model_and_data

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("more", [[], ["--lora", "4"]])
def test_as_on_the_cpu(more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses fall as they do on the CPU."""
    model, data = small_model_and_data(tmp_path)
    sizes = ["--length", "32", "--batch", "4", "--microbatches", "2", "--rate", "1e-2", "--warmup", "1", "--steps", "4"]
    losses = []
    for device in ("cpu", "cuda:0"):
        where = ["--model", model, "--data", data, "--device", device, "--out", str(tmp_path / device)]
        monkeypatch.setattr(sys, "argv", ["finetune.py", *where, *sizes, *more])
        torch._dynamo.reset()
        runpy.run_path(str(Path(__file__).parents[2] / "examples/finetune.py"), run_name="__main__")
        lines = (tmp_path / device / "losses.csv").read_text().splitlines()[1:]
        losses.append([float(line.split(",")[1]) for line in lines])
    assert losses[0][3] < losses[0][0] and losses[1] == pytest.approx(losses[0], rel=1e-2)
