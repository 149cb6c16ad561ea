"""Recurrence: ``nn.LSTM`` decomposed into basic operations.

On the CPU ``torch.lstm`` runs a layer as one oneDNN operator, which returns an undefined tensor for one of its results,
and AOTAutograd then fails to save that for the backward. Without oneDNN it is decomposed into basic operations, as
``torch.gru`` and the others always are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["spell_out_lstm"]


def spell_out_lstm(module: fx.GraphModule) -> None:
    """Make each LSTM in Dynamo's graph, and in the graphs that it calls, run without oneDNN."""
    for graph in (part.graph for part in module.modules() if isinstance(part, fx.GraphModule)):
        for node in graph.nodes:
            if node.op == "call_function" and node.target in (torch.lstm, torch._VF.lstm):
                node.target = lstm


def lstm(*args: Any, **kwargs: Any) -> Any:
    """``torch.lstm`` without oneDNN."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return torch.lstm(*args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
