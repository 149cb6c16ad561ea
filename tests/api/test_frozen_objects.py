"""Compilations run without collection of what there was before."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.api.frozen_objects import Frozen, old_objects_frozen


class _Asking(nn.Module):
    """Notes how many objects are frozen while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(2, 2), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def passes(self, passes: list) -> list:
        self.frozen.append(gc.get_freeze_count())
        return passes


@pytest.fixture(params=["wrapper", "backend"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., nn.Module]]:
    def compiled(model: _Asking, **options: Any) -> nn.Module:
        options["passes"] = model.passes
        if request.param == "wrapper":
            return roundpipe_fx.compile(model, **options)
        return torch.compile(model, backend="roundpipe_fx", options=options)

    gc.unfreeze()
    monkeypatch.setattr(Frozen, "by_user", False)
    yield compiled
    gc.freeze()  # as the suite has it


def test_what_there_was_is_frozen_while_tracing(compiled: Callable[..., nn.Module]) -> None:
    model = _Asking()
    compiled(model)(torch.ones(1, 2))
    assert max(model.frozen) > 100_000 and not gc.get_freeze_count()
    model = _Asking()
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError):
        compiled(model, memory_budget=1)(torch.ones(1, 2))
    assert max(model.frozen) > 100_000 and not gc.get_freeze_count()


def test_what_the_user_has_frozen_stays_so(compiled: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Asking()
    gc.freeze()
    compiled(model)(torch.ones(1, 2))
    assert model.frozen and gc.get_freeze_count() > 100_000
    with monkeypatch.context() as patch:
        patch.delattr(gc, "get_freeze_count")  # which takes long, and is asked once
        with old_objects_frozen():
            pass
