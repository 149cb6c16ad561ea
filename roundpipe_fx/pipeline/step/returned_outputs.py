"""Returned outputs: which outputs of a pipelined call its caller no longer holds when the backward begins.

The caller gets outputs that were put together of all microbatches, and may be those of an offloaded model on the host.
Where in them an output of the graph is, the first microbatch's tells::

    graph's outputs of microbatch 0   loss, scores of 2 rows
    its call returns                  {"loss": loss, "logits": scores of 2 rows}      scores are at ["logits"]
    the caller gets                   {"loss": mean, "logits": scores of 8 rows}      held until the caller drops them

An output that is not found there, as after a ``merge_output`` of the user's, may be held. Unread ones know themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.pipeline.batches.structures import Path, iterate_leaves
from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph
from roundpipe_fx.runtime.dropped_outputs import is_held
from roundpipe_fx.runtime.unread_outputs import UnreadTensor
from roundpipe_fx.torch_private import StorageReference


class ReturnedOutputs:
    """The outputs of a call, until its backward begins.

    Args:
        graphs: compiled for the microbatches, one for each.
    """

    def __init__(self, graphs: Sequence[PipelinedGraph]) -> None:
        self._graphs = list({id(graph): graph for graph in graphs}.values())
        self._references: Mapping[int, Sequence[StorageReference]] = {}

    def note(self, results: Mapping[int, torch.Tensor], output: Any, returned: Any) -> None:
        """Note what the caller gets.

        Args:
            results: differentiated outputs of the first microbatch's graph, by number.
            output: returned by the first microbatch's call.
            returned: returned to the caller, put together of all microbatches.
        """
        positions = {
            result.untyped_storage()._cdata: position for position, result in results.items() if _has_memory(result)
        }
        leaves = dict(_strided_leaves(returned))
        references: dict[int, list[StorageReference]] = defaultdict(list)
        # One output may be returned in several places, as views of it.
        for path, leaf in _strided_leaves(output):
            position = positions.get(leaf.untyped_storage()._cdata)
            if position is not None and path in leaves:
                references[position].append(StorageReference(leaves[path].untyped_storage()))
        self._references = references

    def see(self, values: Sequence[Mapping[int, Any]]) -> None:
        """Report the outputs that the caller has dropped, and compute those that it holds and that were not made.

        Args:
            values: for each microbatch, what the backward reads.
        """
        saved = [value for values_of_batch in values for value in values_of_batch.values() if _has_memory(value)]
        dropped = {
            position
            for position, references in self._references.items()
            if not any(is_held(reference, saved) for reference in references)
        }
        for graph in self._graphs:
            graph.see_dropped(frozenset(dropped | (graph.unread.positions - graph.unread.held)))
            graph.unread.compute_held()


def _strided_leaves(value: Any) -> Iterator[tuple[Path, torch.Tensor]]:
    return ((path, leaf) for path, _, leaf in iterate_leaves(value) if _has_memory(leaf))


def _has_memory(value: Any) -> bool:
    """Test for a tensor with memory of its own or of a value that it is a view of."""
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return is_strided and not isinstance(value, UnreadTensor)
