"""Recurrence: kernels of recurrent modules and packed sequences, and ``nn.LSTM`` decomposed into basic operations.

On the CPU ``torch.lstm`` runs a layer as one oneDNN operator, which returns an undefined tensor for one of its results,
and AOTAutograd then fails to save that for the backward. Without oneDNN it is decomposed into basic operations, as
``torch.gru`` and the others always are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["pack_padded", "pad_packed", "recurrent_kernel", "spell_out_lstm", "without_mkldnn"]


def spell_out_lstm(module: fx.GraphModule) -> None:
    """Make each LSTM in Dynamo's graph, and in the graphs that it calls, run without oneDNN."""
    for graph in (part.graph for part in module.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            if node.op == "call_function" and node.target in (torch.lstm, torch._VF.lstm):
                node.target = lstm


def lstm(*args: Any, **kwargs: Any) -> Any:
    """``torch.lstm`` without oneDNN."""
    with without_mkldnn():
        return torch.lstm(*args, **kwargs)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Context manager without oneDNN."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def recurrent_kernel(kind: str) -> Callable[..., Any]:
    """The kernel of all layers of a recurrent module: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    kernel: Callable[..., Any] = getattr(torch._VF, kind)
    return kernel


def pack_padded(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The kernel of ``pack_padded_sequence``."""
    data, batch_sizes = torch._VF._pack_padded_sequence(padded, lengths, batch_first)
    return data, batch_sizes


def pad_packed(data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: int) -> tuple[Tensor, Tensor]:
    """The kernel of ``pad_packed_sequence``."""
    padded, lengths = torch._VF._pad_packed_sequence(data, batch_sizes, batch_first, value, steps)
    return padded, lengths
