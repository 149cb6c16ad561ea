"""The body of a tile loop: the operations of a region on one tile of its rows.

Take the gradient of w2 in y = tanh(x·w1)·w2, where x has 96 rows, in 5 tiles. Four tiles have 20 rows and the last one
has 16, so there are two bodies. The one for 20 rows::

    body(x[20, 4], w1[4, 64], dy[20, 4], dw2_sum[64, 4])    operands first: rows of x and dy, all of w1; then the sums
        h = x @ w1                                          [20, 64]: wide values exist for one tile at a time
        a = tanh(h)
        add_product_to(dw2_sum, aᵀ, dy)                     dw2 has no rows: it is the sum over tiles, added to in place
        return ()                                           the tile's parts of results that have rows: here are none

Rows in several dimensions are one dimension outside of the body: x[2, 48, 4] is passed as x[20, 4], and the body views
it as [1, 20, 4], since its operations expect three dimensions.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from roundpipe_fx.analysis.cost import CostModel, annotate_node, note_real_values, predict_workspaces
from roundpipe_fx.analysis.dimensions import LOGARITHMS, arguments_on_tile
from roundpipe_fx.analysis.liveness import Event, find_peak
from roundpipe_fx.analysis.storage_ids import OUTSIDE, StorageIds
from roundpipe_fx.analysis.tiling.rows import Rows, described, divided_labels, tile_sizes
from roundpipe_fx.analysis.tiling.tiled_region import TileRegion
from roundpipe_fx.ir.fingerprint import fingerprint
from roundpipe_fx.ir.joint_graph import Mark, input_nodes, tensor_values
from roundpipe_fx.ir.tile_loop import TileLoop, TileResult, WidestValue
from roundpipe_fx.operators.gradient_sums import SUMMING, add_exponential_to, add_product_to, add_to
from roundpipe_fx.torch_private import boxed_codegen

aten = torch.ops.aten


class UnfitError(Exception):
    """A region's results do not lie in memory such that tiles can be put together."""


@dataclass(frozen=True, kw_only=True)
class Divided:
    """The operations of one loop.

    Attributes:
        region: whose operations these are.
        nodes: the operations, in order.
        operands: what they read of others, each once.
        results: what others read of them.
        instead: by value that is read, what is given for it.
    """

    region: TileRegion
    nodes: tuple[fx.Node, ...]
    operands: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]
    instead: Mapping[fx.Node, fx.Node]


@dataclass(frozen=True, kw_only=True)
class LoopCost:
    """Bytes and seconds of a loop.

    Attributes:
        seconds: modelled, of all tiles.
        flops: floating-point operations of all tiles.
        workspace: bytes that the operations on one tile hold at most.
    """

    seconds: float
    flops: int
    workspace: int


@dataclass(frozen=True, kw_only=True)
class BodyCosts:
    """Builds the bodies of loops and counts their costs.

    Attributes:
        device: that operations run on; ``None``: not known, as are workspaces.
        granularity: bytes that the device's allocator rounds sizes up to.
        eager: whether operations run as they are.
        rewrite: applied to each body.
        present: whether the device is there to measure workspaces on.
    """

    model: CostModel
    device: torch.device | None
    granularity: int
    eager: bool
    rewrite: Callable[[fx.Graph], fx.Graph]
    present: bool = True


def divide(
    region: TileRegion, nodes: Iterable[fx.Node], results: Iterable[fx.Node], instead: Mapping[fx.Node, fx.Node]
) -> Divided:
    """Find the values that a loop over these operations reads, and those of its own that others read."""
    members = tuple(nodes)
    inside = set(members)
    operands = dict.fromkeys(instead.get(source, source) for source in sources_of(members) if source not in inside)
    where = {
        **region.where,
        **{replacement: region.where[read] for read, replacement in instead.items() if read in region.where},
    }
    return Divided(
        region=dataclasses.replace(region, where=where),
        nodes=members,
        operands=tuple(operands),
        results=tuple(results),
        instead=instead,
    )


def sources_of(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Operands of some nodes, each once, in the order of reading."""
    return list(dict.fromkeys(source for node in nodes for source in input_nodes(node)))


def flat_shape(shape: Sequence[Any], rows: Rows) -> list[Any]:
    """A shape with the dimensions of its rows, which are adjacent, as one."""
    size: Any = 1
    for position in rows:
        size = size * shape[position]
    return [*shape[: rows[0]], size, *shape[rows[-1] + 1 :]]


def is_flat(value: Any, rows: Rows) -> bool:
    """Return whether the rows of a value are evenly apart in memory."""
    try:
        _flatten_rows(value, rows)
    except UnfitError:
        return False
    return True


class Loops:
    """The loops of a graph; regions that do the same have one.

    Args:
        costs: how bodies are made and counted.
    """

    def __init__(self, costs: BodyCosts) -> None:
        self.costs = costs
        self._made: dict[Any, tuple[TileLoop, LoopCost]] = {}
        self._names: set[str] = set()

    def make_loop(self, divided: Divided, tiles: int, name: str) -> tuple[TileLoop, LoopCost]:
        """Make the loop over ``tiles`` tiles, or reuse an equal one. Arguments and errors as for :func:`build_loop`."""
        where = [divided.region.where.get(node) for node in (*divided.operands, *divided.results)]
        # The fingerprint leaves out names: regions of twelve equal layers get one loop.
        key = fingerprint(divided.nodes, divided.results, divided.operands), tiles, tuple(where)
        if key not in self._made:
            numbered = (name if not number else f"{name}_{number + 1}" for number in itertools.count())
            unused = next(candidate for candidate in numbered if candidate not in self._names)
            self._made[key] = build_loop(divided, tiles, unused, self.costs)
            self._names.add(unused)
        return self._made[key]


def build_loop(divided: Divided, tiles: int, name: str, costs: BodyCosts) -> tuple[TileLoop, LoopCost]:
    """Build the loop over a number of tiles.

    Args:
        divided: what it does. Operands and results by rows have one dimension for these.
        tiles: at most the number of rows.
        name: of the loop, in emitted text.
        costs: how bodies are made and counted.

    Raises:
        UnfitError: a result overlaps itself in memory, or its rows are not evenly apart.
    """
    region = divided.region
    # All tiles have `size` rows but the last one, which has `left`: two bodies at most.
    size = region.rows_of_tile(tiles)
    tiles = -(-region.rows // size)
    last_size = region.rows - (tiles - 1) * size
    bodies = {rows: _build_body(divided, rows, costs) for rows in dict.fromkeys((size, last_size))}
    dims = [region.where[operand][0] if operand in region.where else None for operand in divided.operands]
    results = [_describe_result(region, node) for node in divided.results]
    full_tile = bodies[size]
    text = fingerprint(
        [node for node in full_tile.graph.nodes if node.op == "call_function"],
        full_tile.graph.output_node().all_input_nodes,
        full_tile.graph.find_nodes(op="placeholder"),
    )
    wide = region.widest.meta["val"]
    loop = TileLoop(
        name=name,
        bodies=bodies,
        rows=region.rows,
        tiles=tiles,
        dims=dims,
        results=results,
        widest=WidestValue(name=region.widest.name, dtype=wide.dtype, shape=tuple(wide.shape)),
        digest=text,
    )
    counts = {size: tiles - 1, last_size: 1} if last_size != size else {size: tiles}
    seconds, flops = 0.0, 0
    for rows, count in counts.items():
        for node in _list_computed(bodies[rows].graph):
            seconds += count * node.meta[Mark.SECONDS]
            flops += count * node.meta[Mark.FLOPS]
    workspace = loop.workspace(max(_peak_bytes(body.graph, costs) for body in bodies.values()))
    return loop, LoopCost(seconds=seconds, flops=flops, workspace=workspace)


def _list_computed(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _describe_result(region: TileRegion, node: fx.Node) -> TileResult:
    value = node.meta["val"]
    if node not in region.where:
        return TileResult(
            shape=tuple(value.shape),
            stride=_dense_strides(value),
            dtype=value.dtype,
            dim=None,
            is_logarithm=node.target in LOGARITHMS,
        )
    flat = _flatten_rows(value, region.where[node])
    return TileResult(
        shape=tuple(flat.shape), stride=_dense_strides(flat), dtype=value.dtype, dim=region.where[node][0]
    )


def _dense_strides(value: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor that fills its memory, each place once."""
    expected = 1
    # Strides in order have to multiply up: the result fills its memory, so tiles can be written into it.
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1:
            if stride != expected:
                raise UnfitError
            expected *= size
    return tuple(int(stride) for stride in value.stride())


def _flatten_rows(value: Any, rows: Rows) -> Any:
    if len(rows) == 1:
        return value
    with value.fake_mode:
        try:
            return aten.view.default(value, flat_shape(value.shape, rows))
        except (RuntimeError, ValueError) as error:
            raise UnfitError from error


def _build_body(divided: Divided, rows: int, costs: BodyCosts) -> fx.GraphModule:
    """Build the graph of a tile of ``rows`` rows."""
    region = divided.region
    graph = fx.Graph()
    call = functools.partial(_add_call, graph, costs.device if costs.eager and costs.present else None)
    values: dict[fx.Node, fx.Node] = {}
    for operand in divided.operands:
        values[operand] = _add_placeholder(graph, operand.name, _make_tile(operand, region, rows))
    sums = {node for node in divided.results if node not in region.where}
    totals = {
        node: _add_placeholder(
            graph,
            f"{node.name}_sum",
            _make_empty_copy(node.meta["val"], _describe_result(region, node).accumulation_dtype),
        )
        for node in divided.results
        if node in sums
    }
    for operand in divided.operands:
        # Rows that lie in several dimensions are one dimension outside of the body (flat), and separate ones inside.
        if operand in region.where and len(region.where[operand]) > 1:
            shape = _tile_shape(operand, region, rows)
            values[operand] = call(operand, aten.view.default, values[operand], shape)
    values.update({read: values[replacement] for read, replacement in divided.instead.items() if replacement in values})
    for node in divided.nodes:
        is_plain = node not in sums or totals[node].meta["val"].dtype is node.meta["val"].dtype
        # A matrix product that is summed over tiles is accumulated by the kernel (beta = 1), so no product exists
        # beside the sum.
        if node in sums and is_plain and node.target is aten.mm.default:
            left, right = fx.map_arg(node.args, values.__getitem__)
            values[node] = call(node, add_product_to, totals[node], left, right)
            continue
        args, kwargs = _arguments_on_tile(node, region, rows)
        args, kwargs = fx.map_arg((args, kwargs), values.__getitem__)
        target = aten.reshape.default if node.target in _VIEWS else node.target
        values[node] = call(node, target, *args, **kwargs)
        if node in sums:
            if not is_plain:
                wider = totals[node].meta["val"].dtype
                values[node] = call(node, aten._to_copy.default, values[node], dtype=wider)
            # Logarithms of sums are added as log(exp(a) + exp(b)).
            add = add_exponential_to if node.target in LOGARITHMS else add_to
            values[node] = call(node, add, totals[node], values[node])
    parts = []
    for node in divided.results:
        # Sums are not returned: they are written in place.
        if node in sums:
            continue
        part = values[node]
        if len(region.where[node]) > 1:
            part = call(node, aten.reshape.default, part, flat_shape(part.meta["val"].shape, region.where[node]))
        parts.append(part)
    graph.output(tuple(parts))
    _drop_unread(graph)
    for node in _list_computed(graph):
        annotate_node(node, costs.model)
    if costs.device is not None:
        workspaces = predict_workspaces(
            _list_computed(graph), costs.device, fused=not costs.eager, present=costs.present
        )
        for node, size in workspaces.items():
            node.meta[Mark.WORKSPACE] = size
    costs.rewrite(graph)
    graph.set_codegen(boxed_codegen())
    return fx.GraphModule(nn.Module(), graph, "tile")


_VIEWS = (aten.view.default, aten._unsafe_view.default)


def _drop_unread(graph: fx.Graph) -> None:
    # From the end, so that operations which only an unread one has read go too.
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and node.target not in SUMMING:
            graph.erase_node(node)


def _arguments_on_tile(node: fx.Node, region: TileRegion, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if node in region.whole or node.target is operator.getitem:
        return node.args, node.kwargs
    known = described(node)
    assert known is not None
    labels, sizes = divided_labels(known, region.where, region.rows), known.dimensions.sizes
    # Sizes of the rows' dimensions are those of one tile; arguments that name sizes (view, expand) are written for
    # these.
    return arguments_on_tile(node, known.dimensions, {**sizes, **tile_sizes(labels, sizes, region.rows, rows)})


def _add_placeholder(graph: fx.Graph, name: str, value: torch.Tensor) -> fx.Node:
    placeholder = graph.placeholder(name)
    placeholder.target = placeholder.name
    placeholder.meta["val"] = value
    return placeholder


def _make_tile(operand: fx.Node, region: TileRegion, rows: int) -> Any:
    value = operand.meta["val"]
    if operand not in region.where:
        return value
    position = region.where[operand]
    flat = _flatten_rows(value, position)
    with value.fake_mode:
        tile = flat.narrow(position[0], 0, rows * region.multiple(operand))
        return torch.empty_strided(tile.shape, tile.stride(), dtype=tile.dtype, device=tile.device)


def _tile_shape(operand: fx.Node, region: TileRegion, rows: int) -> list[int]:
    positions = region.where[operand]
    shape = list(operand.meta["val"].shape)
    size = rows * region.multiple(operand)
    return [*shape[: positions[0]], *[1] * (len(positions) - 1), size, *shape[positions[-1] + 1 :]]


def _make_empty_copy(value: Any, dtype: torch.dtype) -> Any:
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


_KEPT = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack")


def _add_call(
    graph: fx.Graph, device: torch.device | None, original: fx.Node, target: Any, /, *args: Any, **kwargs: Any
) -> fx.Node:
    node = graph.create_node("call_function", target, args, kwargs, name=original.name)
    node.meta = {key: original.meta[key] for key in _KEPT if key in original.meta}
    if target in SUMMING:
        node.meta["val"] = args[0].meta["val"]
        return node
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    mode = next(value.fake_mode for source in (original, *original.all_input_nodes) for value in tensor_values(source))  # type: ignore[attr-defined]
    with mode:
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    if device is not None:
        note_real_values(node, device)
    return node


def _peak_bytes(graph: fx.Graph, costs: BodyCosts) -> int:
    """Bytes that a body holds at most beside its operands and sums.

    A compiled body returns what is to be added to the sums (:mod:`roundpipe_fx.runtime.compiled_loops`).
    """
    numbers = StorageIds(costs.granularity)
    events = []
    returned: set[int] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            # Operands and sums are values of the graph that the loop is in, where they are counted.
            numbers.assign(node, [OUTSIDE] * len(tensor_values(node)))
        elif node.op == "output" or (node.target in SUMMING and not costs.eager):
            returned.update(storage for source in node.all_input_nodes for storage in numbers.get(source))
        else:
            allocated = numbers.follow(node)
            events.append(Event(node, numbers.reads(node), allocated, workspace=node.meta.get(Mark.WORKSPACE, 0)))
    return find_peak(events, numbers.sizes, lasting=returned - {OUTSIDE}).bytes
