"""Tile loops in compiled stages: one opaque operator for a stage compiler, around bodies that it compiles on their own.

A compiled body does not write over the sums: it returns what is to be added, and the loop adds it. A matrix product is
added without being made, as in eager stages. For a body that returns the tile's part of a and sums up dw::

    as planned      body(x, dy, dw_sum): a = tanh(x);  add_product_to(dw_sum, aᵀ, dy);  return (a,)
    as compiled     body(x, dy):         a = tanh(x);  return (a, aᵀ, dy)
    around it       add_product_to(dw_sum, aᵀ, dy), sums in the order of the planned body: their bits depend on it
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from roundpipe_fx.codegen.loop_text import list_loops
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.operators.gradient_sums import SUMMING

Boxed = Callable[[list[Any]], tuple[Any, ...]]
"""Takes one list of arguments, which it clears."""

_loops: weakref.WeakValueDictionary[int, TileLoop] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@torch.library.custom_op("roundpipe_fx::tile_loop", mutates_args=())
def _tile_loop(operands: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return list(_loops[number](*operands))


@_tile_loop.register_fake
def _(operands: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [
        torch.empty_strided(result.shape, result.stride, dtype=result.dtype, device=operands[0].device)
        for result in _loops[number].results
    ]


def opaque_loops(module: fx.GraphModule, compiled: Callable[[fx.GraphModule], Boxed]) -> list[TileLoop]:
    """Replace loops by calls of an operator. The module is rewritten in place.

    Args:
        module: with ordinary positional arguments.

    Returns:
        the loops, which the caller keeps alive as long as the module may be called.
    """
    # The loop is called by number, since an operator's arguments are tensors and numbers. It is weak here: the module
    # keeps it.
    replaced: dict[TileLoop, tuple[int, TileLoop]] = {}
    for loop in list_loops(module.graph):
        number = next(_numbers)
        replaced[loop] = number, loop.map_bodies(lambda body: _compile_body(body, compiled))
        _loops[number] = replaced[loop][1]
    for node in module.graph.nodes:
        if node.target in replaced:
            # The compiler sees an operator with a list of operands, and compiles around it.
            node.args = (list(node.args), replaced[node.target][0])
            node.target = torch.ops.roundpipe_fx.tile_loop.default
            node.meta["val"] = list(node.meta["val"])
    if replaced:
        module.recompile()
    return [loop for _, loop in replaced.values()]


def _compile_body(body: fx.GraphModule, compiled: Callable[[fx.GraphModule], Boxed]) -> Boxed:
    """A body whose operations are compiled, and which adds to the sums itself."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    parts: Any = graph.graph_copy(body.graph, copies)
    graph.output(parts)
    adding = [node for node in graph.nodes if node.target in SUMMING]
    inputs = graph.find_nodes(op="placeholder")
    added_to = {node.args[0] for node in adding}
    totals = [node for node in inputs if node in added_to]
    position = {node: number for number, node in enumerate(totals)}
    # A sum `add_product_to(total, a, b)` becomes two more results of the body, a and b, and is added outside.
    sums = [(node.target, position[node.args[0]], len(node.args) - 1) for node in adding]
    graph.output_node().args = ((*parts, *(operand for node in adding for operand in node.args[1:])),)
    for node in (*adding, *totals):
        graph.erase_node(node)
    graph.set_codegen(body.graph._codegen)
    call = compiled(fx.GraphModule(body, graph))
    count = len(inputs) - len(totals)

    def run(arguments: list[Any]) -> tuple[Any, ...]:
        values, held = arguments[:count], arguments[count:]
        arguments.clear()
        computed = list(call(values))
        results, added = computed[: len(parts)], iter(computed[len(parts) :])
        del computed
        # In the order of the body: the bits of a sum depend on it.
        for target, number, operands in sums:
            target(held[number], *itertools.islice(added, operands))
        return tuple(results)

    return run
