"""Saving while training goes on: ``torch.distributed.checkpoint.async_save`` of a model on the host whose optimizer
works within the step. What is written is what there was between two steps; resumed from it, training has the same bits.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map

import roundpipe_fx
from tests.conftest import FullDisk
from tests.pipeline.steps import Blocks, step_batch

pytestmark = [
    pytest.mark.usefixtures("on_the_host"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def _compiled(model: nn.Module) -> tuple[roundpipe_fx.CompiledModule, torch.optim.Optimizer]:
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=2, stages=3, optim_dtype=torch.float32)
    return compiled, torch.optim.AdamW(compiled.optim_parameters(), 0.01, fused=True)


def _state(model: roundpipe_fx.CompiledModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    copies = {name: own.detach() for name, own in model.optim_named_parameters()}
    return {"model": model.state_dict(), "copies": copies, "optimizer": optimizer.state_dict()}


def _assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    left, right = ({keystr(path): value for path, value in tree_leaves_with_path(own)} for own in (one, other))
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name], name


def _trained(model: roundpipe_fx.CompiledModule, optimizer: torch.optim.Optimizer, steps: int) -> None:
    batch = step_batch()
    for _ in range(steps):
        model.forward_backward(**batch | {"x": batch["x"].bfloat16()}, optimizer=optimizer, synchronize=False)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, state)


def test_what_is_written_while_training_goes_on_is_what_there_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks(dropout=0.1).bfloat16()
    fresh = copy.deepcopy(model)
    compiled, optimizer = _compiled(model)
    _trained(compiled, optimizer, 2)
    held, write = threading.Event(), dcp.FileSystemWriter.write_data

    def writing(self: dcp.FileSystemWriter, *given: Any) -> Any:
        held.wait(10)
        return write(self, *given)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", writing)
    expected = _copied(_state(compiled, optimizer))
    saving = dcp.async_save(_state(compiled, optimizer), checkpoint_id=tmp_path, no_dist=True)
    torch.manual_seed(1)
    _trained(compiled, optimizer, 2)
    assert not saving.done()
    held.set()
    saving.result()

    resumed, other = _compiled(fresh)
    with roundpipe_fx.OptimizerCtx():
        get_optimizer_state_dict(resumed, other)
    state = _state(resumed, other)
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["optimizer"])
    _assert_equal(_state(resumed, other), expected)
    torch.manual_seed(1)
    _trained(resumed, other, 2)
    _assert_equal(_state(resumed, other), _state(compiled, optimizer))


def test_a_full_disk_is_told_of_and_neither_the_last_checkpoint_nor_training_suffers(
    tmp_path: Path, full_disk: FullDisk
) -> None:
    model = Blocks().bfloat16()
    reference, expected = _compiled(copy.deepcopy(model))
    compiled, optimizer = _compiled(model)
    _trained(compiled, optimizer, 1)
    dcp.async_save(_state(compiled, optimizer), checkpoint_id=tmp_path / "first", no_dist=True).result()
    before = _copied(_state(compiled, optimizer))
    with full_disk():
        saving = dcp.async_save(_state(compiled, optimizer), checkpoint_id=tmp_path / "second", no_dist=True)
        _trained(compiled, optimizer, 1)
        with pytest.raises(dcp.CheckpointException, match="File too large"):
            saving.result()
    assert not (tmp_path / "second" / ".metadata").exists()
    kept = _copied(_state(compiled, optimizer))
    dcp.load(kept, checkpoint_id=tmp_path / "first", no_dist=True)
    _assert_equal(kept, before)
    _trained(compiled, optimizer, 1)
    _trained(reference, expected, 3)
    _assert_equal(_state(compiled, optimizer), _state(reference, expected))
