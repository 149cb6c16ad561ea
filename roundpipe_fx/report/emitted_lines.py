"""Where a value stands in the emitted code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import fx

from roundpipe_fx.codegen import StageModule, stage_text
from roundpipe_fx.ir.joint_graph import Mark, Phase

__all__ = ["EmittedLine", "emitted_lines"]

_ASSIGNED = re.compile(r'    (\w+): "')


class EmittedLine(NamedTuple):
    """A line of the emitted code.

    Attributes:
        file: name of the file; of modules that do the same work, the first one's.
        line: number of the line, from 1.
        text: the line; where modules do the same work, with the names of the first one.
        modules: number of modules that do the same work, which are this text.
    """

    file: str
    line: int
    text: str
    modules: int


def emitted_lines(
    modules: Iterable[StageModule], own_nodes: Mapping[str, Mapping[str, fx.Node]]
) -> dict[str, tuple[EmittedLine, ...]]:
    """By name of a value, the lines that compute it: first in the forward, then those that recompute it.

    Args:
        modules: the emitted stage modules.
        own_nodes: by name of a stage module and of its node, the node of the joint graph that it stands for.
    """
    by_module: dict[str, list[EmittedLine]] = {}
    first: dict[str, str] = {}
    lines: dict[str, list[tuple[str, EmittedLine]]] = {}
    every = list(modules)
    alike = Counter(module.fingerprint for module in every)
    for module in sorted(every, key=lambda module: module.phase is not Phase.FORWARD):
        file = first.setdefault(module.fingerprint, f"stage_{module.stage}.{module.phase}.py")
        if file not in lines:
            lines[file] = list(_assigning(file, stage_text(module), alike[module.fingerprint]))
        for name, line in lines[file]:
            node = own_nodes[module.name].get(name)
            if node is not None:
                by_module.setdefault(str(node.meta.get(Mark.ORIGIN, node.name)), []).append(line)
    return {name: tuple(lines_of_name) for name, lines_of_name in by_module.items()}


def _assigning(file: str, text: str, modules: int) -> Iterator[tuple[str, EmittedLine]]:
    for number, line in enumerate(text.splitlines(), 1):
        assigned = _ASSIGNED.match(line)
        if assigned is not None:
            yield assigned[1], EmittedLine(file, number, line.strip(), modules)
