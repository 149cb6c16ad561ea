"""Returned outputs: which outputs of a pipelined call its caller still holds when the backward begins.

The caller gets outputs that were put together of all microbatches, and may be those of an offloaded model on the host.
Where in them an output of the graph is, the first microbatch's tells::

    graph's outputs of microbatch 0   loss, scores of 2 rows
    its call returns                  {"loss": loss, "logits": scores of 2 rows}      scores are at ["logits"]
    the caller gets                   {"loss": mean, "logits": scores of 8 rows}      held until the caller drops them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.pipeline.batches.structures import iterate_leaves
from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph
from roundpipe_fx.runtime.dropped_outputs import Reference, is_held, make_reference
from roundpipe_fx.runtime.unread_outputs import UnreadTensor


class ReturnedOutputs:
    """The outputs of a call, until its backward begins.

    Args:
        graphs: compiled for the microbatches, one for each.
    """

    def __init__(self, graphs: Sequence[PipelinedGraph]) -> None:
        self._graphs = list({id(graph): graph for graph in graphs}.values())
        self._held: Mapping[int, Reference] = {}

    def note(self, results: Mapping[int, torch.Tensor], output: Any, returned: Any) -> None:
        """Note what the caller gets.

        Args:
            results: differentiated outputs of the first microbatch's graph, by number.
            output: returned by the first microbatch's call.
            returned: returned to the caller, put together of all microbatches.
        """
        leaves = {path: leaf for path, _, leaf in iterate_leaves(returned) if isinstance(leaf, torch.Tensor)}
        held: dict[int, Reference] = {}
        for path, _, leaf in iterate_leaves(output):
            for position, result in results.items():
                if isinstance(leaf, torch.Tensor) and path in leaves and _is_of(leaf, result):
                    held[position] = make_reference(leaves[path])
        self._held = held

    def see(self, values: Sequence[Mapping[int, Any]]) -> None:
        """Report the outputs that the caller has dropped, and compute those that it holds and that were not made.

        Args:
            values: for each microbatch, what the backward reads.
        """
        saved = [value for of_batch in values for value in of_batch.values()]
        # An output that was not found in what the caller gets may be held by a hook or an attribute.
        dropped = frozenset(position for position, of in self._held.items() if not is_held(of, saved))
        for graph in self._graphs:
            graph.see_dropped(dropped)
            graph.unread.compute_held()


def _is_of(leaf: torch.Tensor, result: torch.Tensor) -> bool:
    """Test for a tensor that is a graph's output or has its memory."""
    if leaf is result:
        return True
    if isinstance(leaf, UnreadTensor) or isinstance(result, UnreadTensor):
        return False
    return leaf.untyped_storage()._cdata == result.untyped_storage()._cdata
