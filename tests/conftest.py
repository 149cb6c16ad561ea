"""Shared by all tests."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from roundpipe_fx.passes import workspaces

os.environ["ROUNDPIPE_FX_PLAN_CACHE"] = "0"  # tests leave nothing behind, and find nothing
os.environ["ROUNDPIPE_FX_VERIFY"] = "1"  # of all graphs that tests compile, after each pass


def pytest_collection_finish() -> None:
    """What was imported stays, so no test has to wait while garbage is looked for in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh():
    """Each test traces again and draws its own random numbers."""
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels need nothing for themselves: what is planned does not depend on the machine."""
    monkeypatch.setattr(workspaces, "workspaces_of", lambda *_: {})
