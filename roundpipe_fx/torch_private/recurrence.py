"""Recurrence: ``nn.LSTM`` as the operations that it is made of.

On the CPU ``torch.lstm`` runs a layer as one operator of oneDNN's. That one returns nothing for one of its results,
which AOTAutograd then fails to save for the backward. Without oneDNN it is made of operations that every pass knows, as
``torch.gru`` and the others are anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["spell_out_lstm"]


def spell_out_lstm(module: fx.GraphModule) -> None:
    """Have a graph of Dynamo's, and those it calls, run each LSTM without oneDNN."""
    for graph in (own.graph for own in module.modules() if isinstance(own, fx.GraphModule)):
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
