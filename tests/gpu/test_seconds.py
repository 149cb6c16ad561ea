"""Bytes hold whatever the seconds: of plans that are made with other ones, and of workers that are late."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import random
import time
from typing import Any

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.pipeline import lowered_pipeline
from roundpipe_fx.runtime.mailbox import Mailboxes
from roundpipe_fx.schedules import StageAction, StepCosts
from tests import hugging_face

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("seed", [4, 5])
def test_a_model_on_the_host_keeps_its_peaks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step_costs, send = lowered_pipeline.step_costs, Mailboxes.send
    late: list[int] = []

    def factor(step: StageAction) -> float:
        return 10 ** random.Random(f"{seed}{step[0].name}{step[1]}").uniform(-1, 1)

    def other_costs(*arguments: Any) -> StepCosts:
        costs = step_costs(*arguments)
        return dataclasses.replace(costs, seconds={step: own * factor(step) for step, own in costs.seconds.items()})

    def send_and_stop(self: Mailboxes, device: int, *arguments: Any) -> None:
        send(self, device, *arguments)
        if device in late:
            time.sleep(0.02)

    monkeypatch.setattr(lowered_pipeline, "step_costs", other_costs)
    monkeypatch.setattr(Mailboxes, "send", send_and_stop)
    model, batch = hugging_face.vit(), hugging_face.image_batch()
    devices = ["cuda:0", "cuda:1"]
    compiled = roundpipe_fx.compile(
        model, devices=devices, num_microbatches=1, stage_compiler="eager", memory_budget=0.0
    )
    compiled.forward_backward(**batch)
    for late_worker in (0, 1):
        late[:] = [late_worker]
        model.zero_grad()
        gc.collect()
        with contextlib.ExitStack() as stack:
            peaks = [stack.enter_context(roundpipe_fx.measure_peak(device)) for device in devices]
            compiled.forward_backward(**batch)
        planned = compiled.plan.pipeline.peak_bytes
        assert all(0 < peak.bytes <= size for peak, size in zip(peaks, planned, strict=True)), (peaks, planned)
