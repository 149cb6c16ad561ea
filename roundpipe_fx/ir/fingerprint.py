"""Fingerprints: equal for graphs that do the same work on the same shapes, whatever the names of their nodes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

_SYMBOL = re.compile(r"\b[suz]+\d+\b")


def fingerprint(nodes: Iterable[fx.Node], results: Iterable[Any] = (), inputs: Iterable[fx.Node] = ()) -> str:
    """A digest of the structure of nodes: operators, constants, shapes, dtypes, strides, devices and edges.

    Inputs and size symbols are numbered in the order of their first use, so two experts whose token counts are
    different symbols have equal fingerprints.

    Args:
        inputs: inputs in order, if their order matters (arguments of a function).
    """
    numbers: dict[fx.Node, str] = {}
    symbols: dict[str, str] = {}
    lines: list[str] = []

    def describe(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            kind = f"{value.dtype}{shape}{_strides(value)}{value.device}{value.requires_grad}"
            # Sizes are numbers, so no symbol occurs in the text.
            if all(type(size) is int for size in shape):  # strides are products of sizes
                return kind
        elif isinstance(value, (tuple, list)):
            return f"({','.join(map(describe, value))})"
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            kind = f"{type(value).__name__}({value})"
        else:
            kind = type(value).__name__
        return _SYMBOL.sub(lambda match: symbols.setdefault(match.group(), f"n{len(symbols)}"), kind)

    def name(value: Any) -> str:
        if isinstance(value, fx.Node):
            if value not in numbers:
                numbers[value] = f"%{len(numbers)}"
                # A node outside of the sequence is an input: only its type is described, and not how it was made.
                lines.append(f"{numbers[value]} = {describe(value.meta.get('val'))}")
            return numbers[value]
        if isinstance(value, (tuple, list)):
            return f"({','.join(map(name, value))})"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{name(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({name(value.start)},{name(value.stop)},{name(value.step)})"
        if isinstance(value, str) and value.startswith("Runtime assertion failed"):
            return "message"  # contains names of symbols and nodes
        return repr(value)

    for node in inputs:
        name(node)
    for node in nodes:
        target = node.target
        if node.op == "get_attr":
            owner = node.graph.owning_module
            target = f"{target}@{id(owner)}"  # constants are equal only if they are the same object
        call = f"{node.op} {target} {name(node.args)} {name(node.kwargs)}"
        lines.append(f"{name(node)} <- {call}")
    lines.append(f"return {name(tuple(results))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _strides(value: torch.Tensor) -> tuple[Any, ...]:
    return tuple(value.stride()) if value.layout is torch.strided else ()
