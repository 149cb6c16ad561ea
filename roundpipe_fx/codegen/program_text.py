"""Emitted code as readable Python source, which can be reviewed and run.

Each module is a function with one line per operation, the dtype and shape of each value, a comment with the user's
module above its lines, and ``x = None`` after the last use of a value.
"""

from __future__ import annotations

import itertools
import operator
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from roundpipe_fx.codegen.last_uses import find_last_uses
from roundpipe_fx.codegen.loop_text import list_loops, loop_text
from roundpipe_fx.codegen.program import Program
from roundpipe_fx.codegen.stage_modules import StageModule
from roundpipe_fx.ir.joint_graph import Mark, module_path
from roundpipe_fx.ir.text import argument_text, expression_text, is_own, type_text
from roundpipe_fx.ir.tile_loop import TileLoop
from roundpipe_fx.torch_private import module_path_text

_IMPORTS = "import operator\n\nimport torch\nfrom torch import device, inf, nan\n"
_NAMES = "\naten = torch.ops.aten\n"


_COLUMNS = 120


def stage_text(module: StageModule) -> str:
    """A stage module as a Python function that takes a list and clears it."""
    graph = module.module.graph
    names = {node: node.name for node in graph.nodes}
    lines = [f"def {module.name}(args):"]
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if inputs:
        lines.append("    (")
        lines += [f"        {names[node]},  # {type_text(node.meta.get('val'))}" for node in inputs]
        lines.append("    ) = args")
    lines.append("    args.clear()")
    dying = find_last_uses(graph)
    current = None
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        # A comment wherever the user's module changes, not on every line.
        path = _origin(node)
        if path != current:
            lines.append(f"    # {path or 'model'}")
            current = path
        line = f'    {names[node]}: "{type_text(node.meta.get("val"))}" = {expression_text(node, names)}'
        dead = [names[value] for value in dying[node]]
        if dead:
            line += f";  {' = '.join(dead)} = None"
        lines.append(line)
    results = graph.output_node().args[0]
    lines.append(f"    return {argument_text(results, names)}")
    loops = [f"{loop_text(loop)}\n\n" for loop in list_loops(graph)]
    return _header(graph) + "\n\n" + "".join(loops) + "\n".join(lines) + "\n"


def _header(graph: fx.Graph) -> str:
    modules: dict[str, set[str]] = {}
    bodies = [body.graph for loop in list_loops(graph) for body in loop.bodies.values()]
    for node in itertools.chain(graph.nodes, *(body.nodes for body in bodies)):
        if node.op == "call_function" and is_own(node.target) and not isinstance(node.target, TileLoop):
            modules.setdefault(node.target.__module__, set()).add(node.target.__name__)
    imported = [f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(modules.items())]
    return _IMPORTS + "".join(["\n", *imported] if imported else []) + _NAMES


def program_text(program: Program, describe: Callable[[StageModule], str] = lambda module: "") -> str:
    """A program as the Python function that runs it.

    Lists are built and the names in them deleted before each call, so the callee holds the only references and every
    value dies at its last use. Stream operations do nothing on the CPU.

    Args:
        describe: a comment for each stage call.
    """
    graph = program.module.graph
    calls = {call.name: call for call in program.calls}
    lines = [f"def {program.name}(args):"]
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    if inputs:
        lines += ["    (", *(f"        {name}," for name in inputs), "    ) = args"]
    lines.append("    args.clear()")
    last_use = _find_last_use(graph)
    unused = [node.name for node in graph.nodes if node.op == "placeholder" and node not in last_use]
    if unused:
        lines += _wrap_items("    del (", unused, ")")
    record_stream = torch.ops.streams.record_stream.default
    # Neighbouring `record_stream` calls become one line.
    for target, group in itertools.groupby(list(graph.nodes), key=lambda node: node.target):
        nodes = list(group)
        if target is record_stream:
            lines += _record_lines(nodes)
            continue
        for node in nodes:
            lines += _program_lines(node, calls, last_use, describe)
    returned: Any = graph.output_node().args[0]
    results = [argument_text(value, {node: node.name for node in graph.nodes}) for value in returned]
    lines += _wrap_items("    return (", results, ",)" if len(results) == 1 else ")")
    return "\n".join(lines) + "\n"


def _program_lines(
    node: fx.Node,
    calls: Mapping[str, StageModule],
    last_use: Mapping[fx.Node, fx.Node],
    describe: Callable[[StageModule], str],
) -> list[str]:
    if node.op == "call_module":
        return _call_lines(node, calls[str(node.target)], last_use, describe)
    if node.op == "call_function" and node.target is not operator.getitem:
        operands = node.all_input_nodes
        line = f"    {expression_text(node, {operand: operand.name for operand in operands})}"
        if not operands:  # an operation on streams
            return [line]
        dying = [operand.name for operand in operands if last_use[operand] is node]
        return [f"    {node.name} = {line.strip()}", *(_wrap_items("    del (", dying, ")") if dying else [])]
    return []


def _record_lines(nodes: list[fx.Node]) -> list[str]:
    """Several ``record_stream`` in a row as one call for each stream."""
    lines = []
    for stream, group in itertools.groupby(nodes, key=lambda node: node.args[1]):
        lines += _wrap_items("    streams.record_streams([", [str(node.args[0]) for node in group], f"], {stream})")
    return lines


def _wrap_items(opening: str, items: list[str], closing: str) -> list[str]:
    """``opening item, item closing`` on one line if that fits, else in lines of at most 120 columns."""
    line = f"{opening}{', '.join(items)}{closing}"
    if len(line) <= _COLUMNS:
        return [line]
    indent = " " * 8
    body = textwrap.wrap(
        ", ".join(items) + ",",
        _COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [opening, *body, f"    {closing.removeprefix(',')}"]


def _call_lines(
    node: fx.Node, call: StageModule, last_use: Mapping[fx.Node, fx.Node], describe: Callable[[StageModule], str]
) -> list[str]:
    lines = []
    comment = describe(call)
    if comment:
        lines.append(f"    # {comment}")
    arguments: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    # The list is built, and the names of what dies are deleted, so the callee holds the last references.
    lines += _wrap_items("    call = [", [argument.name for argument in arguments], "]")
    dying = [argument.name for argument in dict.fromkeys(arguments) if last_use[argument] is node]
    if dying:
        lines += _wrap_items("    del (", dying, ")")
    results = [user.name for user in sorted(node.users, key=_item_index)]
    lines += _wrap_items("    [", results, f"] = {node.target}(call)") if results else [f"    {node.target}(call)"]
    unread = [user.name for user in node.users if user not in last_use]
    if unread:
        lines += _wrap_items("    del (", unread, ")")
    return lines


def _item_index(item: fx.Node) -> int:
    index = item.args[1]
    assert isinstance(index, int)
    return index


def _find_last_use(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    last_use: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target is operator.getitem:
            continue
        for source in node.all_input_nodes:
            last_use[source] = node
    return last_use


def _origin(node: fx.Node) -> str:
    path = module_path(node, module_path_text)
    origin = node.meta.get(Mark.ORIGIN)
    return f"{path or 'model'} (recomputed)" if origin else path
