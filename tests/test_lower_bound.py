"""The lower bound: below everything that planning finds, and below the best of all schedules of small graphs."""

from __future__ import annotations

import heapq
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.lower_bound import lower_bound
from benchmarks.rotor import rotor_candidates
from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.read_operations import read_operations
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import search
from tests.remat.graphs import mlp, operations_of, staged
from tests.remat.test_save_policy import RandomModel, operations, relaxed


@pytest.mark.long
@relaxed
@given(operations, st.integers(1, 3))
def test_nothing_that_is_found_is_below_it(chain: list, stages: int) -> None:
    torch.manual_seed(0)
    joint, segments = staged(RandomModel([("linear", 0), *chain]), torch.randn(5, 4), stages=stages)
    graph = read_operations(joint, segments)
    bound = lower_bound(graph)
    assert 0 < bound.bytes <= search(Blocks(graph)).candidates[-1].peak.bytes
    assert bound.bytes <= rotor_candidates(graph)[-1].peak.bytes


def exhaustive(graph: OperationGraph) -> int:
    """The least peak of all schedules: Dijkstra, by the peak so far, over what has run and what is there.

    It is generous: whatever the forward made may be there when the backward begins, and a result is written over an
    operand whether or not that dies.
    """
    backward = [operation for block in graph.backward.values() for operation in block]
    makers = {storage: operation for operation in backward for storage in operation.makes}
    held = graph.outputs | graph.tangents
    always = sum(graph.sizes[storage] for storage in held | graph.must_save)

    def size(storages: set[int] | frozenset[int]) -> int:
        return sum(graph.sizes[storage] for storage in storages - held - graph.must_save)

    def unread(run: frozenset[int]) -> set[int]:
        made = {storage for storage, maker in makers.items() if maker.index in run}
        wanted = {storage for operation in backward if operation.index not in run for storage in operation.reads}
        return made & (wanted | graph.gradients)

    def credit(inplace_candidates: tuple[int, ...]) -> int:
        return max((graph.sizes[storage] for storage in inplace_candidates), default=0)

    forward = sorted(set(graph.makers) - held - graph.must_save)
    always_live = held | graph.must_save
    subsets = itertools.chain.from_iterable(itertools.combinations(forward, k) for k in range(len(forward) + 1))
    queue = [(always + size(frozenset(there)), (), there) for there in subsets]
    heapq.heapify(queue)
    seen = set()
    while queue:
        peak, ran, there_now = heapq.heappop(queue)
        run, there = frozenset(ran), frozenset(there_now)
        if (run, there) in seen:
            continue
        seen.add((run, there))
        if len(run) == len(backward):
            return peak
        live = unread(run) | there
        for operation in backward:
            sources = {storage for storage in operation.reads if graph.is_forward(storage)} - always_live
            ready = all(makers[s].index in run for s in operation.reads if s in makers)
            if operation.index not in run and ready and sources <= there:
                high = always + size(live | set(operation.makes)) - credit(operation.inplace_candidates)
                heapq.heappush(queue, (max(peak, high), tuple(sorted(run | {operation.index})), there_now))
        for table in (graph.recipes, graph.mask_only):
            for recipe in table.values():
                if set(recipe.reads) - always_live <= there and not set(recipe.makes) <= there:
                    high = (
                        always
                        + size(live | set(recipe.makes))
                        + recipe.workspace
                        - credit(recipe.operation.inplace_candidates)
                    )
                    now = tuple(sorted(there | (set(recipe.makes) - always_live)))
                    heapq.heappush(queue, (max(peak, high), ran, now))
        for storage in there:
            heapq.heappush(queue, (peak, ran, tuple(sorted(there - {storage}))))
    raise AssertionError("the backward cannot be run")


class Small(nn.Module):
    """A few operations whose gradients need what came before."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6)) for kind in kinds if kind == "scale")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = iter(self.weights)
        first = x = x * y
        for kind in self.kinds:
            if kind == "scale":
                x = x * next(weights)
            elif kind == "widen":
                x = torch.cat([x, x], 0)
            elif kind == "narrow":
                x = x.sum(0, keepdim=True)
            elif kind == "first":
                x = x + first.sum(0, keepdim=True)
            else:
                x = getattr(torch, kind)(x)
        return x.sum()


kinds = st.lists(st.sampled_from(["scale", "widen", "narrow", "first", "sin", "exp", "tanh"]), min_size=1, max_size=4)


@pytest.mark.long
@relaxed
@given(kinds, st.integers(1, 4))
def test_no_schedule_of_a_small_graph_is_below_it(kinds: list[str], rows: int) -> None:
    graph = operations_of(Small(kinds), torch.randn(rows, 6, requires_grad=True), torch.randn(rows, 6))
    bound = lower_bound(graph)
    if bound.operation is not None:  # else it is the forward that binds, which the search below runs as well
        assert bound.bytes <= exhaustive(graph)
    assert bound.bytes <= search(Blocks(graph)).candidates[-1].peak.bytes


@pytest.mark.parametrize("kinds", [["sin", "exp"], ["tanh", "scale", "sin"]], ids=" ".join)
def test_it_is_reached(kinds: list[str]) -> None:
    graph = operations_of(Small(kinds), torch.randn(5, 6, requires_grad=True), torch.randn(5, 6))
    assert lower_bound(graph).bytes == exhaustive(graph)


def test_it_names_what_binds() -> None:
    graph = operations_of(mlp(), torch.randn(512, 16))
    bound = lower_bound(graph)
    assert bound.operation is not None and bound.operation in [op for block in graph.backward.values() for op in block]
    lowest = search(Blocks(graph)).candidates[-1].peak.bytes
    assert bound.bytes <= lowest <= 1.25 * bound.bytes
