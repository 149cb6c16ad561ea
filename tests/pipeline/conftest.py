from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from roundpipe_fx.pipeline import step
from roundpipe_fx.pipeline.offloaded import Offloaded


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models lie on the host, workers elsewhere, as far as a step is concerned."""

    def always(
        devices: Sequence[torch.device], modules: Sequence[nn.Module], known: Offloaded | None, beside: object
    ) -> Offloaded:
        found = known or Offloaded(torch.device("cpu"))
        found.tensors = {id(v): v for module in modules for v in (*module.parameters(), *module.buffers())}
        return found

    monkeypatch.setattr(step, "offloaded", always)
    monkeypatch.setattr(Offloaded, "pin", lambda self: None)
