"""Models that lie on the host while CUDA devices train them: same bits, and a stage's tensors only while it runs."""

from __future__ import annotations

import copy

import pytest
import torch

import roundpipe_fx
from tests.comparison import Step, assert_bitwise
from tests.golden_models import GOLDEN
from tests.pipeline.steps import SCHEDULES, assert_close, left_behind

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _devices() -> list[list[str]]:
    return [["cuda:0"], *([["cuda:0", "cuda:1"]] if torch.cuda.device_count() > 1 else [])]


def _on_host(step: Step) -> Step:
    return Step(*(_moved(own) for own in vars(step).values()))


def _moved(value):
    if isinstance(value, dict):
        return {name: _moved(own) for name, own in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _steps(name: str, devices: list[str], microbatches: int, **options) -> tuple[Step, Step]:
    """What two training steps leave behind: with the model on the device, and on the host."""
    make, make_batch, _ = GOLDEN[name]
    model = make()
    inputs = {key: torch.cat([value] * microbatches) for key, value in make_batch().items()}
    steps = []
    for place in ("cuda", "cpu"):
        own = copy.deepcopy(model).to(place)
        compiled = roundpipe_fx.compile(
            own, devices=devices, num_microbatches=microbatches, stage_compiler="eager", **options
        )
        torch.manual_seed(0)
        for _ in range(2):
            loss = compiled.forward_backward(**{key: value.to(place) for key, value in inputs.items()})
        step = left_behind(own, loss)
        assert all(value.device.type == place for value in (loss, *step.gradients.values(), *own.parameters()))
        steps.append(_on_host(step))
    return steps[0], steps[1]


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_it_has_the_bits_of_a_model_on_the_device(name: str) -> None:
    for devices in _devices():
        for recompute in ("none", "full"):
            assert_bitwise(*_steps(name, devices, 1, recompute=recompute))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["tied_transformer", "unet"])
def test_microbatches_under_every_schedule(name: str, schedule: str) -> None:
    for devices in _devices():
        assert_close(*_steps(name, devices, 4, schedule=schedule))
