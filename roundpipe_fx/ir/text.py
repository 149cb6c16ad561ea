"""Graphs as text: operations as Python, and a whole joint graph as one function with its phases and stages as comments.

The text is for reading, and for comparing the graphs before and after a pass: node names are kept, and bytes, flops and
seconds are left out, so a line differs only if a pass changed what is computed, or where and when.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.ir.tile_loop import TileLoop


def type_text(value: Any) -> str:
    """A value's type in short: ``float32[8, 16]``, ``Sym(u0)``, a tuple of these."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"Sym({value})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(item) for item in value)})"
    return type(value).__name__


def expression_text(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    """The call that a node makes, as a Python expression.

    Args:
        names: names of its operands.
    """
    if node.target is operator.getitem:
        return f"{argument_text(node.args[0], names)}[{argument_text(node.args[1], names)}]"
    if node.op == "get_attr":
        return f"constants.{node.target}"
    arguments = [argument_text(value, names) for value in node.args]
    arguments += [f"{key}={argument_text(value, names)}" for key, value in node.kwargs.items()]
    return f"{_callable_text(node.target)}({', '.join(arguments)})"


def argument_text(value: Any, names: Mapping[fx.Node, str]) -> str:
    """An operand as a Python expression: a name, a constant, or a list or tuple of these."""
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, tuple):
        return f"({', '.join(argument_text(item, names) for item in value)}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(argument_text(item, names) for item in value)}]"
    if isinstance(value, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return _callable_text(value)
    return repr(value)


def is_own(target: Any) -> bool:
    """Return whether a node's target is a function of this package's."""
    return str(getattr(target, "__module__", "")).startswith("roundpipe_fx.")


def _callable_text(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        text = str(target)
        if target.namespace == "streams":
            return f"streams.{target._schema.name.removeprefix('streams::')}"
        return text if text.startswith("aten.") else f"torch.ops.{text}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"torch.ops.higher_order.{target.name()}"
    if is_own(target):
        return str(target.__name__)
    module = getattr(target, "__module__", "") or ""
    return f"{'operator' if module == '_operator' else module}.{target.__name__}"


def joint_text(joint: JointGraph) -> str:
    """A joint graph as a Python function: inputs with their types, operations, forward outputs and gradients.

    A comment says where the phase, the segment or the stage changes; one at the end of a line shows other marks.
    """
    names = {node: node.name for node in joint.graph.nodes}
    lines = ["def joint(", *(_input_line(node, node in joint.parameters) for node in joint.inputs), "):"]
    section = ""
    for node in joint.computed():
        if _section(node) != section:
            section = _section(node)
            lines.append(f"    # {section}")
        lines.append(f"    {_line(node, names)}{_marks(node)}")
    forward = argument_text(tuple(joint.forward_outputs), names)
    lines.append(f"    return {forward}, {argument_text(tuple(joint.gradients), names)}")
    return "\n".join(lines) + "\n"


def graph_text(graph: fx.Graph) -> str:
    """A stage module's or a program's graph as a Python function."""
    names = {node: node.name for node in graph.nodes}
    lines = ["def graph(", *(_input_line(node) for node in graph.find_nodes(op="placeholder")), "):"]
    for node in graph.nodes:
        if node.op == "call_module":
            lines.append(f"    {node.name} = {node.target}({argument_text(node.args[0], names)})")
        elif node.op == "output":
            lines.append(f"    return {argument_text(node.args[0], names)}")
        elif node.op != "placeholder":
            lines.append(f"    {_line(node, names)}")
    return "\n".join(lines) + "\n"


def _input_line(node: fx.Node, parameter: bool = False) -> str:
    return f"    {node.name}: {_annotation(node)},{_marks(node, ['parameter'] if parameter else [])}"


def _line(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    return f"{node.name}: {_annotation(node)} = {expression_text(node, names)}"


def _annotation(node: fx.Node) -> str:
    """A node's type; the strides too where they are not those of a contiguous tensor."""
    value = node.meta.get("val")
    text = type_text(value)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not _is_plain(value):
        return f"{text}.strides({', '.join(map(str, value.stride()))})"
    return text


def _is_plain(value: torch.Tensor) -> bool:
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(expected):  # as text: comparing symbols would add guards
            return False
        expected = expected * size
    return True


def _section(node: fx.Node) -> str:
    if Mark.PHASE not in node.meta:
        return "captured"
    parts = [str(node.meta[Mark.PHASE])]
    parts += [f"{name} {node.meta[key]}" for name, key in _NUMBERED_MARKS.items() if key in node.meta]
    return ", ".join(parts)


_NUMBERED_MARKS = {"stage": Mark.STAGE, "segment": Mark.SEGMENT}
SHOWN_MARKS = {
    "must run once": Mark.MUST_SAVE,
    "must not be saved": Mark.MUST_RECOMPUTE,
    "repeats": Mark.ORIGIN,
    "workspace": Mark.WORKSPACE,
    "replayed": Mark.REPLAYED,
    "strides matter": Mark.STRIDED,
}


def _marks(node: fx.Node, extra: Sequence[str] = ()) -> str:
    marks = [(name, node.meta[key]) for name, key in SHOWN_MARKS.items() if key in node.meta]
    if isinstance(node.target, TileLoop):
        extra = [*extra, f"{node.target.tiles} tiles of {node.target.rows} rows"]
    shown = [*extra, *(name if value is True else f"{name}: {value}" for name, value in marks)]
    return f"  # {'; '.join(shown)}" if shown else ""
