"""Tests on the emulated devices: ``python -m pytest -p tests.emulated_cuda.plugin``, with the emulator preloaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from torch import fx

from tests.emulated_cuda.cuda_module import device, emulate

emulate()


def pytest_configure(config: pytest.Config) -> None:
    replace_inductor()


def replace_inductor() -> None:
    """Run stages for Inductor eagerly, operation by operation, for the rest of the process."""
    from roundpipe_fx import torch_private
    from roundpipe_fx.runtime import compiled_memory

    torch_private.inductor = _stand_in
    compiled_memory.inductor_code = _no_code


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hardware"):
            item.add_marker(pytest.mark.skip(reason="not emulated"))


@pytest.fixture(autouse=True)
def _no_races() -> Iterator[None]:
    device.races()
    yield
    gc.collect()
    device.capture(False)
    device.empty_cache()  # what is left over of a chunk counts: so that it does not depend on earlier tests
    found = device.races()
    assert not found, "\n".join(found[:5])


def _no_code(*_: Any) -> str:
    raise NotImplementedError("stages run eagerly here, operation by operation")


def _stand_in(module: fx.GraphModule, *_: Any) -> Callable[[list[Any]], Any]:
    """For Inductor, which needs Triton: an eager stage, which writes over nothing."""
    from roundpipe_fx.runtime.eager_stage import eager_stage

    run = eager_stage(module)
    run._boxed_call = True  # type: ignore[attr-defined]
    return run
