"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh():
    """Each test traces anew and draws its own random numbers."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
