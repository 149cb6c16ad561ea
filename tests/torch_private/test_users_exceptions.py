"""Exceptions that only the run on fake tensors raises: the user gets Dynamo's error, and no log."""

from __future__ import annotations

import logging

import pytest
import torch

import roundpipe_fx
from tests.pipeline.steps import CPUS


class _RaisingWhileTraced(torch.nn.Module):
    """Converts a submodule to its dtype, as routers do; what follows fails in tracing only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear = self.linear.to(x.dtype)
        if torch.compiler.is_compiling():
            raise TypeError("only while it is traced")
        return self.linear(x)


def test_an_exception_that_only_tracing_raises_is_that_of_tracing() -> None:
    compiled = roundpipe_fx.compile(_RaisingWhileTraced(), devices=CPUS, num_microbatches=2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="needs the model in one graph") as raised:
        compiled(torch.randn(4, 2))
    assert "only while it is traced" in str(raised.value)


class _BreakingAndFailingOnFakes(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        if not torch.compiler.is_compiling():
            x = x @ x  # as an operator whose fake implementation accepts less than its kernel
        return super().forward(x)


def test_what_fails_on_fakes_is_not_logged() -> None:
    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="needs the model in one graph"):
            roundpipe_fx.compile(_BreakingAndFailingOnFakes(2, 2), devices=CPUS)(torch.randn(4, 2))
    finally:
        logger.removeHandler(handler)
    assert not records
