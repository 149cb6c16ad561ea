"""Minimum cuts: which vertices of a network stay with the source when the cheapest set of arcs is cut.

Choices that depend on each other, each with a price, are written as a network: one vertex for each yes or no, an arc
from a to b with the price of "a and not b", and an arc that cannot be cut for "a implies b". The vertices on the
source's side are answered with yes::

              3               uncuttable            5
    source ──────▶ a is saved ──────────▶ b is saved ──────▶ sink

Here saying yes to a costs nothing and saying no costs 3, but yes to a means yes to b, which costs 5: the cut is 3.

The flow is SciPy's (``scipy.sparse.csgraph.maximum_flow``), since networkx's runs in Python and a plan takes
hundreds of cuts. It counts in 32 bits, so sizes are divided by :func:`choose_unit` them first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Arc = tuple[int, int, int]
"""From a vertex, to a vertex, and what cutting it costs."""

SOURCE, SINK = 0, 1
"""The first two vertices."""
CAPACITY = 1_000_000_000
"""Maximum total cost of the arcs that can be cut."""
UNCUTTABLE = 2_000_000_000
"""The cost of an arc that is in no minimum cut."""


def choose_unit(sizes: Iterable[int]) -> int:
    """Choose the unit by which sizes are divided, so that they can be capacities.

    Their greatest common divisor, or a multiple of it if their total would otherwise exceed :data:`CAPACITY`.
    """
    sizes = list(sizes)
    divisor = math.gcd(*sizes) or 1
    return divisor * max(math.ceil(sum(sizes) / (divisor * CAPACITY)), 1)


def minimum_cut(arcs: Sequence[Arc], vertices: int) -> tuple[int, set[int]]:
    """The minimum cut of a network.

    Args:
        arcs: at least one. The costs of several between the same vertices add up.
        vertices: how many there are: the arcs are between vertices 0 (the source), 1 (the sink) and others below it.

    Returns:
        its cost, and the vertices on the source's side: of several minimum cuts, the one with the fewest.
    """
    starts, ends, costs = zip(*arcs, strict=True)
    network = csr_array((np.array(costs, dtype=np.int64), (starts, ends)), shape=(vertices, vertices))
    # Uncuttable arcs may add up where parallel ones are merged; 32 bits hold only one.
    network.data = np.minimum(network.data, UNCUTTABLE)
    network = network.astype(np.int32)
    flow = maximum_flow(network, SOURCE, SINK)
    # Vertices that are still reachable from the source in the residual network: the source's side of the cut with
    # fewest vertices.
    residual = network - flow.flow
    residual.data = np.maximum(residual.data, 0)
    residual.eliminate_zeros()
    reached = breadth_first_order(residual, SOURCE, return_predecessors=False)
    return int(flow.flow_value), set(reached.tolist())
