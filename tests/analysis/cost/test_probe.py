"""Trials are kept on disk: a later process tries no operator again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from roundpipe_fx.analysis.cost import probe
from tests.capturing import capture_joint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "1")
    monkeypatch.setenv("ROUNDPIPE_FX_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def another_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    def begin() -> None:
        for name, value in (("_probed", {}), ("_files_read", set()), ("_not_written", set())):
            monkeypatch.setattr(probe, name, value)

    begin()
    return begin


def _product() -> fx.Node:
    x = torch.randn(8, 8, requires_grad=True)
    joint = capture_joint(lambda x: (x @ x).sum(), x)
    return next(node for node in joint.computed() if node.target is torch.ops.aten.mm.default)


def _probed(node: fx.Node) -> probe.Probe:
    found = probe.run_in_thread(lambda: probe.probe_alone(node, CPU))
    assert found is not None
    return found


def test_a_later_process_tries_nothing_again(
    folder: Path, another_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = _product()
    before = _probed(node)
    probe.write_probes(CPU)
    another_process()
    monkeypatch.setattr(probe, "_probe_device", lambda *_: pytest.fail("it is tried again"))
    assert _probed(node) == before
    assert before.layouts == (probe.TensorLayout((8, 8), (8, 1)),)


@pytest.mark.parametrize("content", [b"", b"{}\n[]", b"\x80\x04", b"[]"])
def test_a_file_that_is_not_one_is_ignored(
    content: bytes, folder: Path, another_process: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = _product()
    before = _probed(node)
    probe.write_probes(CPU)
    (path,) = folder.iterdir()
    path.write_bytes(content)
    another_process()
    with caplog.at_level(logging.INFO, "roundpipe_fx"):
        assert _probed(node) == before
    assert any("is ignored" in record.message for record in caplog.records)


def test_nothing_is_written_where_the_cache_is_off(
    folder: Path, another_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "0")
    _probed(_product())
    probe.write_probes(CPU)
    assert not list(folder.iterdir())
