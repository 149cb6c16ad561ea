"""torch.distributed.checkpoint: a compiled model is saved and loaded as the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

import roundpipe_fx
from tests.linear_chain import linear_chain


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for _ in range(2):
        model(torch.randn(4, 4)).square().mean().backward()
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


@pytest.mark.filterwarnings("ignore")  # of one process
@pytest.mark.parametrize("options", [{"memory_budget": 0.5}, {"num_microbatches": 2}], ids=["budget", "microbatches"])
def test_saved_and_resumed(options: dict[str, Any], tmp_path: Path) -> None:
    first, second, eager = linear_chain(), linear_chain(), linear_chain()
    model = roundpipe_fx.compile(first, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer)
    dcp.save(_state(model, optimizer), checkpoint_id=tmp_path)
    resumed = roundpipe_fx.compile(second, **options)
    its_optimizer = torch.optim.AdamW(resumed.parameters())
    state = _state(resumed, its_optimizer)
    dcp.load(state, checkpoint_id=tmp_path)
    set_state_dict(resumed, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    weights = {"model": get_model_state_dict(eager)}
    dcp.load(weights, checkpoint_id=tmp_path)  # by the model that was never compiled
    assert all(map(torch.equal, eager.parameters(), first.parameters()))
    _train(model, optimizer)
    _train(resumed, its_optimizer)
    assert all(map(torch.equal, second.parameters(), first.parameters()))
    assert not any(map(torch.equal, eager.parameters(), first.parameters()))


@pytest.mark.filterwarnings("ignore")  # of one process
def test_optimizer_parameters(tmp_path: Path) -> None:
    models = [roundpipe_fx.compile(linear_chain(), optim_dtype=torch.float64) for _ in range(2)]
    trained, loaded = models
    _train(trained, torch.optim.SGD(trained.optim_parameters(), lr=0.1))
    states = [{"model": own.state_dict(), "copies": dict(own.optim_named_parameters())} for own in models]
    dcp.save(states[0], checkpoint_id=tmp_path)
    dcp.load(states[1], checkpoint_id=tmp_path)
    assert all(map(torch.equal, loaded.parameters(), trained.parameters()))
    assert all(map(torch.equal, loaded.optim_parameters(), trained.optim_parameters()))
    assert not all(own.float().double().equal(own) for own in trained.optim_parameters())
