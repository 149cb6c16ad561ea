"""Functions of other libraries that stand in Dynamo's graph as one call, and that AOTAutograd traces.

Dynamo cannot trace every ``autograd.Function``: not one that writes a product into a part of a buffer (``out=tile``),
nor one that returns ``None`` among tensors and asks for no zeros as their gradients. AOTAutograd runs the Python code
on fake tensors, with autograd's own rules, and has no such limits. PyTorch's way to say so is
``torch.compiler.allow_in_graph``. But what Dynamo does not look into it does not guard on either, so it is right only
for functions that read nothing but their arguments; these are known by name:

- TRL's loss, from which ``SFTTrainer`` takes the log-probability of each token (``ChunkedLogProbFunction``): tiles of
  the logits one after another, in the forward and again in the backward. On CUDA it scores only the tokens that have a
  label, whose number is known once they are counted, in kernels written in Triton, which cannot run on fake tensors.
  While it is traced it does what it does on devices without Triton: all tokens, in PyTorch's operations.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from roundpipe_fx import torch_private


@contextlib.contextmanager
def known_functions_in_graph() -> Iterator[None]:
    """Context manager in which Dynamo puts the functions that are known, of libraries that are imported, in graphs."""
    kernels: Any = sys.modules.get("trl.kernels.chunked_logprob")
    loss = getattr(kernels, "ChunkedLogProbFunction", None)
    uses_triton = getattr(kernels, "_use_triton", None)
    if loss is None or uses_triton is None:  # another release
        yield
        return
    if getattr(kernels, "_TRITON_AVAILABLE", False):
        _trace_without_triton(uses_triton)
    with torch_private.allowed_in_graph(loss), mock.patch.object(kernels, "_use_triton", _without_triton):
        yield


def _without_triton(device: torch.device) -> bool:
    return False


@functools.cache
def _trace_without_triton(uses_triton: Any) -> None:
    """Let Dynamo take the answer of devices without Triton; a module's attribute that changes would fail its guards."""
    torch.compiler.substitute_in_graph(uses_triton)(_without_triton)
