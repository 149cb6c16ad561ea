"""Rates of a device are measured once, and nothing else changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES, Roofline, calibration, cost_model, find_roofline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder for files, which this process has not read."""
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    # An emulated device computes on the host.
    monkeypatch.setattr(calibration, "_SECONDS", 60.0)
    known = dict(calibration._rates)
    calibration._rates.clear()
    yield tmp_path
    calibration._rates.clear()
    calibration._rates.update(known)


DEVICE = torch.device("cuda:0")


def _state(device: torch.device) -> dict[str, Any]:
    return {
        "host's numbers": torch.get_rng_state().tolist(),
        "numbers": torch.cuda.get_rng_state(device).tolist(),
        "allocated": torch.cuda.memory_allocated(device),
        "device": torch.cuda.current_device(),
        "stream": torch.accelerator.current_stream(device).stream_id,
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "attention": (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()),
        "page-locked": dict(getattr(torch.cuda.cudart(), "registered", {})),
    }


def _multiplied(device: torch.device) -> None:
    """The workspace of cuBLAS is there afterwards, as in every process that computes."""
    torch.mm(torch.ones(2, 2, device=device), torch.ones(2, 2, device=device))
    torch.cuda.synchronize(device)


def _modelled() -> Roofline:
    costs = cost_model("roofline", DEVICE)
    assert isinstance(costs, Roofline)
    return costs


def test_a_device_is_measured_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = _modelled()
    (path,) = folder.glob("rates_*.json")
    rates = json.loads(path.read_text().splitlines()[1])
    assert set(rates) == set(calibration._names()) and all(rate > 0 for rate in rates.values())
    assert measured.flops[torch.bfloat16] == rates["torch.bfloat16"] and measured.host == rates["host"]
    assert 0 < measured.both_ways <= 1 and measured.overhead <= measured.launch
    assert measured.rates.startswith("calibration of the ") and torch.__version__ in measured.rates
    calibration._rates.clear()  # as in another process
    monkeypatch.setattr(calibration, "_measure", None)
    assert _modelled() == measured


def _unexpected(value: Any) -> Any:
    raise AssertionError("a hook of the caller's was called")


def test_state_is_as_before() -> None:
    other = torch.device("cuda", torch.cuda.device_count() - 1)
    stream = torch.Stream(other)
    with torch.accelerator.device_index(other.index), stream, torch.inference_mode():
        _multiplied(other)
        with torch.accelerator.device_index(DEVICE.index):
            _multiplied(DEVICE)
        before = _state(other), _state(DEVICE)
        with torch.autograd.graph.saved_tensors_hooks(_unexpected, _unexpected):
            assert _modelled().rates.startswith("calibration")
        assert (_state(other), _state(DEVICE)) == before


def test_less_memory_than_it_takes_is_said_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "_BYTES", 1 << 60)
    with caplog.at_level(logging.WARNING):
        assert _modelled() == find_roofline(DEVICE)
    assert "the table's rates are used" in caplog.text and "are free" in caplog.text
    assert not list(folder.iterdir())


@pytest.mark.parametrize("part", ["_time_products", "_time_memory_and_launches", "_time_link", "_time_attention"])
def test_running_out_of_memory_restores_all(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _multiplied(DEVICE)
    seconds, kept = calibration._Clock._time_run, list[str]()

    def fail(clock: Any, run: Any, times: int = 4) -> float:
        if kept == [part]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return seconds(clock, run, times) if part != "_time_products" else seconds(clock, run, 1)

    original = getattr(calibration._Clock, part)

    def marked(clock: Any, *args: Any) -> Any:
        kept.append(part)
        return original(clock, *args)

    monkeypatch.setattr(calibration._Clock, "_time_run", fail)
    monkeypatch.setattr(calibration._Clock, part, marked)
    before = _state(DEVICE)
    with caplog.at_level(logging.WARNING):
        assert _modelled() == find_roofline(DEVICE)
    assert "CUDA out of memory" in caplog.text
    assert _state(DEVICE) == before


def test_a_slow_device_keeps_the_rates_of_the_table(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calibration, "_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING):
        assert _modelled() == find_roofline(DEVICE)
    assert "it takes longer than 0 s" in caplog.text


def test_ranks_and_plans_for_other_devices_take_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_measure", None)
    assert cost_model("roofline", torch.device("cuda"), "H100") == DEVICES["H100"]
    assert cost_model("roofline", DEVICE, None, DEVICES["H100"].network).rates == find_roofline(DEVICE).rates
    monkeypatch.setattr(calibration, "_has_ranks", lambda: True)
    assert _modelled() == find_roofline(DEVICE)


def test_a_compiled_model_names_its_rates() -> None:
    model = roundpipe_fx.compile(torch.nn.Linear(8, 8, device="cuda"), stage_compiler="eager")
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    assert "seconds are modelled with the calibration of the " in str(model.plan)
