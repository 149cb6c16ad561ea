"""Shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn

from roundpipe_fx.passes import workspaces
from roundpipe_fx.pipeline.step import step
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.pipeline.step.offloaded import Offloaded, tensors_of

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


FullDisk = Callable[[], contextlib.AbstractContextManager[None]]


@pytest.fixture
def full_disk() -> FullDisk:
    """A context manager in which no file can grow beyond 16 KiB: what writes more fails, as it does on a full disk."""

    @contextlib.contextmanager
    def limited() -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models lie on the host, workers elsewhere, as far as a step is concerned."""

    def always(mode: Local, modules: Sequence[nn.Module], beside: object) -> Offloaded:
        found = mode if isinstance(mode, Offloaded) else Offloaded(mode.devices or (torch.device("cpu"),))
        all_of_them = (v for module in modules for v in (*module.parameters(), *module.buffers()))
        found.tensors = {id(part): part for value in all_of_them for part in tensors_of(value)}
        return found

    monkeypatch.setattr(step, "placed", always)
    monkeypatch.setattr(Offloaded, "pin", lambda self: None)
