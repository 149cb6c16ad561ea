"""A tile loop as the Python function that runs it."""

from __future__ import annotations

from torch import fx

from roundpipe_fx.codegen.last_uses import find_last_uses
from roundpipe_fx.ir.joint_graph import module_path
from roundpipe_fx.ir.text import argument_text, expression_text, type_text
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.torch_private import module_path_text


def list_loops(graph: fx.Graph) -> list[TileLoop]:
    """List the loops of a stage module, in order."""
    return list(dict.fromkeys(node.target for node in graph.nodes if isinstance(node.target, TileLoop)))


def loop_text(loop: TileLoop) -> str:
    """A loop as a function of its operands.

    If the tiles do not divide the rows, the operations are shown once more for the remaining rows.
    """
    full_body = loop.bodies[loop.size]
    placeholders = [node.name for node in full_body.graph.find_nodes(op="placeholder")]
    operands = placeholders[: len(loop.dims)]
    sums = iter(placeholders[len(loop.dims) :])
    output = full_body.graph.output_node()
    parts = iter(f"{node.name}_rows" for node in output.args[0])
    # Sums over tiles are updated in place under their own names; results by rows are filled part by part.
    names = [next(sums) if result.dim is None else next(parts) for result in loop.results]
    positions = list(range(len(operands)))
    placed = operands[next((position for position in positions if loop.dims[position] is not None), 0)]
    lines = [f"def {loop.__name__}({', '.join(operands)}):"]
    for name, result in zip(names, loop.results, strict=True):
        dtype = result.accumulation_dtype
        memory = f"torch.empty_strided({result.shape}, {result.stride}, dtype={dtype}, device={placed}.device)"
        start = ".zero_()" if result.start == 0 else f".fill_({result.start})"
        lines.append(f"    {name} = {memory}{start if result.dim is None else ''}")
    # Full tiles in a loop, then the rest, whose body has other sizes.
    remainder = loop.rows % loop.size
    lines.append(f"    for start in range(0, {loop.rows - remainder}, {loop.size}):  # {loop.rows} rows")
    lines += _tile_lines(loop, loop.size, operands, names, "start", "        ")
    if remainder:
        lines.append(f"    # the last {remainder} rows")
        lines += _tile_lines(loop, remainder, operands, names, str(loop.rows - remainder), "    ")
    results = [
        name if result.accumulation_dtype is result.dtype else f"{name}.to({result.dtype})"
        for name, result in zip(names, loop.results, strict=True)
    ]
    lines.append(f"    return ({', '.join(results)},)")
    return "\n".join(lines) + "\n"


def _tile_lines(
    loop: TileLoop, rows: int, operands: list[str], results: list[str], start: str, indent: str
) -> list[str]:
    graph = loop.bodies[rows].graph
    inputs = graph.find_nodes(op="placeholder")
    names = {node: node.name for node in graph.nodes}
    lines = []
    for node, operand, dim in zip(inputs, operands, loop.dims, strict=False):
        if dim is not None:
            names[node] = f"{operand}_tile"
            value = node.meta["val"]
            first = _first_position(start, value.shape[dim] // rows)
            lines.append(
                f'{indent}{names[node]}: "{type_text(value)}" = {operand}.narrow({dim}, {first}, {value.shape[dim]})'
            )
    total_names = [name for name, result in zip(results, loop.results, strict=True) if result.dim is None]
    names.update(zip(inputs[len(operands) :], total_names, strict=True))
    lasting = {*inputs}
    dying = find_last_uses(graph)
    current = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        path = module_path(node, module_path_text)
        if path != current:
            lines.append(f"{indent}# {path or 'model'}")
            current = path
        line = f'{indent}{names[node]}: "{type_text(node.meta.get("val"))}" = {expression_text(node, names)}'
        dead = [names[value] for value in dying[node] if value not in lasting]
        lines.append(line + (f";  {' = '.join(dead)} = None" if dead else ""))
    returned = iter(graph.output_node().args[0])
    for name, result in zip(results, loop.results, strict=True):
        if result.dim is not None:
            part = argument_text(next(returned), names)
            multiple = result.shape[result.dim] // loop.rows
            first = _first_position(start, multiple)
            lines.append(f"{indent}{name}.narrow({result.dim}, {first}, {rows * multiple}).copy_({part})")
    return lines


def _first_position(start: str, multiple: int) -> str:
    """The text of a tile's first position, given its first row and the number of positions of a row."""
    if multiple == 1:
        return start
    return str(int(start) * multiple) if start.isdecimal() else f"{start} * {multiple}"
