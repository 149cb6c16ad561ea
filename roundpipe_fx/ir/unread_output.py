"""An output of the forward that no caller is expected to read: a smaller value is returned in its stead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx


@dataclass(frozen=True, kw_only=True)
class UnreadOutput:
    """An output that is computed only if its caller reads it after all.

    Attributes:
        value: the fake output.
        module: computes it: gets the value that is returned in its stead, then inputs of the graph.
        inputs: numbers of these inputs among those of the forward.
    """

    value: torch.Tensor
    module: fx.GraphModule
    inputs: Sequence[int]
