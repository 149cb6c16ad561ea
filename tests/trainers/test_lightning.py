"""Lightning: the numbers of the same run without roundpipe_fx."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.linear_chain import linear_chain


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = linear_chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(model: lightning.LightningModule, folder: Path) -> float:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
    return trainer.callback_metrics["loss"].item()


@pytest.mark.parametrize("inside", [False, True], ids=["the LightningModule", "its network"])
def test_lightning(inside: bool, tmp_path: Path) -> None:
    eager, model = Regression(), Regression()
    expected = _fit(eager, tmp_path / "eager")
    if inside:
        compiled: nn.Module = roundpipe_fx.compile(model.body, memory_budget=0.5)
        model.body = compiled
        found = _fit(model, tmp_path / "compiled")
    else:
        compiled = roundpipe_fx.compile(model, memory_budget=0.5)
        found = _fit(compiled, tmp_path / "compiled")
    assert found == expected and roundpipe_fx.plans(compiled)[-1].training
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    (saved,) = (tmp_path / "compiled").rglob("*.ckpt")
    assert all(map(torch.equal, Regression.load_from_checkpoint(saved).parameters(), eager.parameters()))


class Direct(Regression):
    """Its step calls the network, not ``self``."""

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        loss = self.body(batch[0]).square().mean()
        self.log("loss", loss)
        return loss


class Validated(Direct):
    """Its validation alone calls ``self``."""

    def on_train_start(self) -> None:
        self(torch.zeros(1, 4))


@pytest.mark.parametrize("cls", [Direct, Validated])
def test_a_training_step_that_does_not_call_the_compiled_model_is_told_of(cls: type[Direct], tmp_path: Path) -> None:
    expected = _fit(Direct(), tmp_path / "eager")
    compiled = roundpipe_fx.compile(cls(), memory_budget=0.5)
    with pytest.warns(UserWarning, match=r"training_step does not call the compiled .* eagerly") as told:
        assert _fit(compiled, tmp_path / "compiled") == expected
    (warning,) = [one for one in told if "roundpipe_fx" in str(one.message)]
    assert "model.body = roundpipe_fx.compile(model.body, memory_budget=…)" in str(warning.message)
    assert warning.filename == __file__

    part = Direct()  # what the warning says
    part.body = roundpipe_fx.compile(part.body, memory_budget=0.5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "roundpipe_fx")
        assert _fit(part, tmp_path / "part") == expected
    assert roundpipe_fx.plans(part)


def test_a_training_step_looks_like_the_models_own() -> None:
    model = Regression()
    compiled = roundpipe_fx.compile(model)
    assert inspect.signature(compiled.training_step) == inspect.signature(model.training_step)
    assert type(compiled).training_step is Regression.training_step
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.log = lambda *_: None  # type: ignore[method-assign]
        compiled.training_step([torch.randn(2, 4)], 0)
    assert compiled.training_step.__func__ is Regression.training_step
