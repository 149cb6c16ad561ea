"""Recurrence: kernels of recurrent modules and packed sequences, and recurrent layers decomposed into basic operations.

On the CPU ``torch.lstm`` runs a layer as one oneDNN operator, which returns an undefined tensor for one of its results,
and AOTAutograd then fails to save that for the backward. Without oneDNN it is decomposed into basic operations, as
``torch.gru`` and the others always are.

PyTorch's decomposition of several layers has no dropout between them, whatever the module says (``_rnn_helper`` tests
``num_layers < i - 1``, which never holds, in torch 2.13). So layers with dropout are run one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["pack_padded", "pad_packed", "recurrent_kernel", "spell_out_recurrence", "without_mkldnn"]


def spell_out_recurrence(module: fx.GraphModule) -> None:
    """Make recurrent layers in Dynamo's graph, and in the graphs that it calls, traceable with their dropout."""
    for graph in (part.graph for part in module.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            if node.op == "call_function":
                node.target = _TRACEABLE.get(node.target, node.target)


def lstm(*args: Any, **kwargs: Any) -> Any:
    """``torch.lstm`` without oneDNN."""
    with without_mkldnn():
        return _with_dropout(torch.lstm, *args, **kwargs)


def gru(*args: Any, **kwargs: Any) -> Any:
    """``torch.gru``."""
    return _with_dropout(torch.gru, *args, **kwargs)


def rnn_tanh(*args: Any, **kwargs: Any) -> Any:
    """``torch.rnn_tanh``."""
    return _with_dropout(torch.rnn_tanh, *args, **kwargs)


def rnn_relu(*args: Any, **kwargs: Any) -> Any:
    """``torch.rnn_relu``."""
    return _with_dropout(torch.rnn_relu, *args, **kwargs)


_TRACEABLE: dict[Any, Callable[..., Any]] = {
    getattr(namespace, traceable.__name__): traceable
    for traceable in (lstm, gru, rnn_tanh, rnn_relu)
    for namespace in (torch, torch._VF)
}
"""Functions that are traced instead of PyTorch's."""


def _with_dropout(
    kernel: Callable[..., Any],
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Call a kernel of all layers, or of each layer, with dropout between them. (Packed data is not traced to here.)"""
    if not train or dropout == 0 or num_layers == 1:
        return kernel(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
    has_cells = isinstance(hx, tuple | list)
    firsts = [state.split(2 if bidirectional else 1) for state in (hx if has_cells else [hx])]
    weights_each = len(params) // num_layers
    # Eager PyTorch draws in this order of memory: steps first.
    data = input.transpose(0, 1) if batch_first else input
    lasts = []
    for number, first in enumerate(zip(*firsts, strict=True)):
        if number:
            data = torch.dropout(data, dropout, True)
        weights = params[number * weights_each : (number + 1) * weights_each]
        data, *last = kernel(
            data, first if has_cells else first[0], weights, has_biases, 1, 0.0, train, bidirectional, False
        )
        lasts.append(last)
    output = data.transpose(0, 1) if batch_first else data
    return output, *(torch.cat(states) for states in zip(*lasts, strict=True))


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
