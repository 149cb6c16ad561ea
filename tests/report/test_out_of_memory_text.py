"""The message of an out-of-memory error, from figures of devices."""

from __future__ import annotations

import dataclasses
import re

import pytest

from roundpipe_fx.report.out_of_memory_text import PlannedMemory, is_explained, original_text, out_of_memory_text
from roundpipe_fx.runtime.step_memory import DeviceMemory

GIB, MIB = 1 << 30, 1 << 20

PLANNED = PlannedMemory(
    budget=12 * GIB,
    fraction=1.0,
    peak_bytes=11 * GIB,
    moment="in stage_0_backward",
    lowest_bytes=9 * GIB,
    is_tiled=False,
)
DEVICE = DeviceMemory(
    device="cuda:0",
    total=24 * GIB,
    free=2 * GIB,
    reserved=21 * GIB,
    allocated=20 * GIB,
    before=13 * GIB,
    parameters=4 * GIB,
    gradients=3 * GIB,
    optimizer=5 * GIB,
    libraries=32 * MIB,
)


@pytest.fixture(autouse=True)
def _default_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


def _text(*devices: DeviceMemory, planned: PlannedMemory = PLANNED) -> str:
    return out_of_memory_text("CUDA out of memory.", "backward", planned, devices)


def test_the_figures_of_a_device() -> None:
    text = _text(DEVICE)
    assert "\n  cuda:0: allocated by the step so far 7.0 GiB\n" in text
    assert (
        "\n  cuda:0: allocated before it 13.0 GiB: parameters and buffers 4.0 GiB, gradients 3.0 GiB, optimizer state "
        "5.0 GiB, kept by libraries 32.0 MiB, others 992.0 MiB\n"
    ) in text
    assert "\n  cuda:0: reserved but not allocated 1.0 GiB, in pieces between what is allocated\n" in text
    assert "\n  cuda:0: free 2.0 GiB of 24.0 GiB, taken outside of PyTorch or by other processes 1.0 GiB\n" in text
    assert is_explained(text) and original_text(text) == "CUDA out of memory."
    assert not is_explained("CUDA out of memory.") and original_text("CUDA out of memory.") == "CUDA out of memory."


def test_a_budget_that_fits_beside_the_rest_is_proposed() -> None:
    text = _text(DEVICE)  # 2 + 21 - 13 = 10 GiB are left, less than the 11 of the plan
    assert f"memory_budget='{int(9.5 * 1024)}MiB', since beside what else is allocated 10.0 GiB are left" in text
    assert "tiling='never'" not in text and "expandable_segments" not in text
    fuller = dataclasses.replace(DEVICE, free=0)
    assert "memory_budget='7782MiB'" in _text(fuller)
    assert "below 9.0 GiB it takes tiles, which tiling='never' would forbid" in _text(fuller)
    tiled = dataclasses.replace(PLANNED, is_tiled=True)
    assert "til" not in _text(fuller, planned=tiled)


def test_where_there_was_enough_memory_it_was_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = dataclasses.replace(DEVICE, free=4 * GIB)
    text = _text(roomy)
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: 12.0 GiB were left" in text
    assert f"memory_budget='{int(0.8 * 12 * 1024)}MiB'" in text
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in _text(roomy)


def test_without_a_budget_what_is_left_is_proposed() -> None:
    planned = dataclasses.replace(PLANNED, budget=None)
    text = _text(DEVICE, planned=planned)
    assert "\n  budget: none\n" in text and "memory_budget='9728MiB'" in text
    assert "memory_budget" not in _text(dataclasses.replace(DEVICE, free=4 * GIB), planned=planned)


def test_a_step_with_no_memory_left_has_no_budget_proposed() -> None:
    full = dataclasses.replace(DEVICE, free=0, reserved=13 * GIB, allocated=13 * GIB)
    assert "memory_budget" not in _text(full) and "others" in _text(full)


def test_of_many_devices_the_fullest_are_listed() -> None:
    devices = [dataclasses.replace(DEVICE, device=f"cuda:{i}", free=(i + 1) * GIB // 4) for i in range(6)]
    text = _text(*devices)
    assert re.findall(r"(cuda:\d): free", text) == [f"cuda:{i}" for i in range(4)]
    assert "\n  … 2 more devices, with more free memory\n" in text
