"""Processes that are forked, such as workers of a DataLoader, call pipelined models without the parent's threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import roundpipe_fx
from roundpipe_fx.runtime import stage_updates
from tests.forked import in_forked_child


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1))


def _loss(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {"devices": ["cpu", "cpu"], "num_microbatches": 2}])
def test_a_child_calls_and_trains_and_so_does_its_child(options: dict[str, Any]) -> None:
    model, x = roundpipe_fx.compile(_model(), **options), torch.randn(4, 4)

    def step() -> torch.Tensor:
        torch.manual_seed(0)
        model.zero_grad()
        model(x).mean().backward()
        gradient = model[0].weight.grad.clone()
        loss = model.forward_backward(x, loss_fn=_loss)
        with torch.no_grad():
            return torch.cat([gradient.flatten(), loss.flatten(), model(x).flatten()])

    expected = step()

    def same() -> None:
        assert torch.equal(step(), expected)

    def same_twice() -> None:
        same()
        in_forked_child(same)
        same()

    in_forked_child(same_twice)
    same()
    model._state_of_roundpipe_fx._pipeline._workers = None  # as in a process that has not run it
    in_forked_child(same)


def test_a_child_of_a_process_whose_thread_runs_a_step() -> None:
    """The step's lock is held by a thread that the child does not have."""
    model, x = roundpipe_fx.compile(_model().eval(), num_microbatches=2), torch.randn(4, 4)
    with torch.no_grad():
        expected = model(x)
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with model._state_of_roundpipe_fx._pipeline._lock:
            is_held.set()
            may_end.wait()

    def call() -> None:
        with torch.no_grad():
            assert torch.equal(model(x), expected)

    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    try:
        in_forked_child(call)
    finally:
        may_end.set()
        thread.join()


def test_a_data_loader_whose_workers_call_the_model() -> None:
    model, rows = roundpipe_fx.compile(_model().eval(), num_microbatches=2), torch.randn(8, 4)

    @torch.no_grad()
    def collate(batch: list[torch.Tensor]) -> torch.Tensor:
        return model(torch.stack(batch))

    expected = torch.cat([collate([*rows[:4]]), collate([*rows[4:]])])  # kernels may round by the number of rows

    def batches() -> Iterator[torch.Tensor]:
        yield from DataLoader(
            rows, batch_size=4, num_workers=2, collate_fn=collate, multiprocessing_context="fork", timeout=60
        )

    for _ in range(2):
        assert torch.equal(torch.cat([*batches()]), expected)
        model.forward_backward(rows, loss_fn=_loss)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_child_that_is_forked_while_an_optimizer_steps_has_all_of_the_step(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, x = _model().eval(), torch.randn(4, 4)
    if dtype is not None:
        original, x = original.bfloat16(), x.bfloat16()
    model = roundpipe_fx.compile(original, num_microbatches=2, optim_dtype=dtype)
    optimizer = torch.optim.AdamW(model.optim_parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    began, run = threading.Event(), stage_updates.StepUpdates.run

    def slowly(step: Any, job: Any) -> None:
        began.set()
        threading.Event().wait(0.2)
        run(step, job)

    monkeypatch.setattr(stage_updates.StepUpdates, "run", slowly)
    model.forward_backward(x, loss_fn=_loss, optimizer=optimizer, synchronize=False)
    began.wait()

    def look() -> None:
        with torch.no_grad():
            model(x)
        assert not any(map(torch.equal, model.parameters(), before))
        model.forward_backward(x, loss_fn=_loss, optimizer=optimizer, synchronize=False)
        model.synchronize()

    in_forked_child(look)
    model.synchronize()


def test_a_child_is_told_of_a_step_that_it_has_in_part() -> None:
    model, x = roundpipe_fx.compile(_model().bfloat16(), optim_dtype=torch.float32), torch.randn(4, 4).bfloat16()
    optimizer = torch.optim.SGD(model.optim_parameters(), lr=0.1)
    model(x).mean().backward()
    may_end = threading.Event()

    def step() -> None:
        may_end.wait()
        optimizer.step()

    model.step(step, True)

    def look() -> None:
        with torch.no_grad():
            model(x)
        with pytest.raises(RuntimeError, match="forked while an optimizer was updating"):
            model.synchronize()
        model(x).mean().backward()
        model.step(optimizer, True)
        model.synchronize()

    try:
        in_forked_child(look)
    finally:
        may_end.set()
    model.synchronize()
    in_forked_child(model.synchronize)
