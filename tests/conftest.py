"""Shared by all tests."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.guards
import torch.fx.experimental.proxy_tensor
from torch import nn

from roundpipe_fx.passes import workspaces
from roundpipe_fx.pipeline.step import step
from roundpipe_fx.pipeline.step.local import Local
from roundpipe_fx.pipeline.step.offloaded import Offloaded, tensors_of
from tests.long import mark_long_cases, split_long_tests

os.environ["ROUNDPIPE_FX_PLAN_CACHE"] = "0"  # tests leave nothing behind, and find nothing
os.environ["ROUNDPIPE_FX_VERIFY"] = "1"  # of all graphs that tests compile, after each pass


# Each compilation pays for things that no test looks at, together a third of the time of many tests:

# PyTorch times the guards for its log, and clears the processor's caches before.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# pytest attaches its handlers to loggers that do not propagate. For a handler of this one, PyTorch formats all graphs.
logging.getLogger("torch.__trace").propagate = True
# Graphs are many objects; a collection of the oldest generation visits all of them, a hundred times in some files.
gc.set_threshold(20000, 20, 50)
# Nor is there a collection after each of many small compilations.
torch._dynamo.config.run_gc_after_compile = False


# While operators are traced, PyTorch replaces methods of `nn.Module` for modules that are called, of which there are
# none then. Python forgets what it knows of each of the subclasses, and there are thousands.
def _trace_functions(tracer: Any, root: Any, concrete_args: Any = None) -> Any:
    if isinstance(root, nn.Module):
        return _trace(tracer, root, concrete_args)
    with unittest.mock.patch.object(torch.fx._symbolic_trace._Patcher, "patch_method", lambda *_, **__: None):
        return _trace(tracer, root, concrete_args)


_trace = torch.fx.experimental.proxy_tensor.PythonKeyTracer.trace
torch.fx.experimental.proxy_tensor.PythonKeyTracer.trace = _trace_functions

_frozen_modules = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long-part", metavar="PART/PARTS", help="of the long tests, run these alone: 0/3 is a third")


# Before pytest deselects by marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_long_cases(items)
    if config.option.long_part is not None:
        part, parts = map(int, config.option.long_part.split("/"))
        items[:], left = split_long_tests(items, part, parts)
        config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    _freeze_what_was_imported()


def _freeze_what_was_imported() -> None:
    """What was imported stays, so no test has to wait while garbage is looked for in it."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.fixture(autouse=True)
def _fresh():
    """Each test traces again and draws its own random numbers."""
    # Seeds of devices that are not there would be kept for them, each with a formatted stack.
    (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(0)
    yield
    torch._dynamo.reset()
    if len(sys.modules) > _frozen_modules + 50:
        _freeze_what_was_imported()


@pytest.fixture
def no_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels need nothing for themselves: what is planned does not depend on the machine."""
    monkeypatch.setattr(workspaces, "predict_workspaces", lambda *_: {})


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

    monkeypatch.setattr(step, "make_mode", always)
    monkeypatch.setattr(Offloaded, "pin", lambda self: None)
