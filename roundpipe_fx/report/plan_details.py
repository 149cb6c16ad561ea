"""Details of a plan: memory over the step, emitted lines, other plans, the timeline.

It is worked out on demand, since planning does not need it. As data it is columns, in which texts are numbers of a
table: a plan of a large model has ten thousand values.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from roundpipe_fx.analysis.memory_timeline import Lifetime, MemoryTimeline, Moment
from roundpipe_fx.codegen import StageModule, stage_text
from roundpipe_fx.ir.alternative_plans import Alternative, Alternatives, AlternativeValue
from roundpipe_fx.ir.joint_graph import Mark, Phase
from roundpipe_fx.report.timeline import Bar, CopyBar, Timeline
from roundpipe_fx.schedules import Action


@dataclass(frozen=True, kw_only=True)
class EmittedStep:
    """Facts that are read off a plan's programs.

    Attributes:
        memory: memory over the step.
        lines: by name of a value, the lines of the emitted code that compute it, then those that recompute it.
    """

    memory: MemoryTimeline
    lines: Mapping[str, tuple[EmittedLine, ...]]


@dataclass(frozen=True, kw_only=True)
class PlanDetails:
    """Details of a plan.

    Attributes:
        step: what is read off its programs; ``None`` for a plan without programs.
        frontier: what :meth:`Plan.frontier` returns; empty without a budget.
        alternatives: the plans on its frontier.
        timeline: when each device of a pipeline runs which action; ``None`` if there is no pipeline, or
            its schedule has more actions than a page can draw.
    """

    step: EmittedStep | None = None
    frontier: tuple[tuple[int, float], ...] = ()
    alternatives: Alternatives = dataclasses.field(default_factory=Alternatives)
    timeline: Timeline | None = None


class _LineOfValue(NamedTuple):
    name: str
    file: str
    line: int
    text: str
    modules: int


def details_as_data(details: PlanDetails) -> dict[str, Any]:
    """Details as data for JSON.

    Returns:
        by name, lists, numbers and texts.
    """
    # Each text is stored once, and columns have its number: names and paths of ten thousand values repeat.
    strings: dict[str, int] = {}
    memory = lines = timeline = None
    if details.step is not None:
        held = details.step.memory
        memory = {
            "moments": _columns(held.moments, Moment._fields, strings),
            "values": _columns(held.values, Lifetime._fields, strings),
            "forward": held.forward,
            "source": held.source,
        }
        rows = [
            _LineOfValue(name, *line) for name, lines_of_name in details.step.lines.items() for line in lines_of_name
        ]
        lines = _columns(rows, _LineOfValue._fields, strings)
    in_reach = details.alternatives
    alternatives = {
        "values": _columns(in_reach.values, _fields(AlternativeValue), strings),
        "plans": [dataclasses.asdict(plan) for plan in in_reach.plans],
        "chosen": in_reach.chosen,
    }
    if details.timeline is not None:
        timeline = {
            name: [[bar.device, str(bar.action), bar.start, bar.end, bar.bytes] for bar in bars]
            for name, bars in (("predicted", details.timeline.predicted), ("measured", details.timeline.measured))
        }
        timeline["copies"] = [
            [
                *(copy.device, str(copy.action), copy.what, copy.to_host, copy.start, copy.end, copy.bytes),
                [strings.setdefault(name, len(strings)) for name in copy.values],
            ]
            for copy in details.timeline.copies
        ]
    return {
        "memory": memory,
        "lines": lines,
        "frontier": details.frontier,
        "alternatives": alternatives,
        "timeline": timeline,
        "strings": list(strings),
    }


def details_from_data(data: Mapping[str, Any]) -> PlanDetails:
    """Read what :func:`details_as_data` returned.

    Args:
        data: as read from JSON.

    Raises:
        KeyError: something is missing.
        TypeError: something is no list, number or text where it should be.
        ValueError: something has a value that it cannot have.
    """
    strings = data["strings"]
    step = timeline = None
    if data["memory"] is not None:
        memory = data["memory"]
        lines: dict[str, list[EmittedLine]] = {}
        # Lines of one value follow each other in their order: those that compute it, then those that recompute it.
        for name, *line in _rows(data["lines"], strings):
            lines.setdefault(name, []).append(EmittedLine(*line))
        step = EmittedStep(
            memory=MemoryTimeline(
                moments=tuple(Moment(*row) for row in _rows(memory["moments"], strings)),
                values=tuple(Lifetime(*row) for row in _rows(memory["values"], strings)),
                forward=memory["forward"],
                source=memory["source"],
            ),
            lines={name: tuple(lines_of_name) for name, lines_of_name in lines.items()},
        )
    if data["timeline"] is not None:
        bars = {
            name: tuple(
                Bar(device, Action.parse(action), *fields) for device, action, *fields in data["timeline"][name]
            )
            for name in ("predicted", "measured")
        }
        copies = tuple(
            CopyBar(
                device=device,
                action=Action.parse(action),
                what=what,
                to_host=to_host,
                start=start,
                end=end,
                bytes=size,
                values=tuple(strings[number] for number in values),
            )
            for device, action, what, to_host, start, end, size, values in data["timeline"]["copies"]
        )
        timeline = Timeline(**bars, copies=copies)
    stored = data["alternatives"]
    names = _fields(AlternativeValue)
    alternatives = Alternatives(
        values=tuple(
            AlternativeValue(**dict(zip(names, row, strict=True))) for row in _rows(stored["values"], strings)
        ),
        plans=tuple(map(_alternative, stored["plans"])),
        chosen=stored["chosen"],
    )
    frontier = tuple((int(size), float(seconds)) for size, seconds in data["frontier"])
    return PlanDetails(step=step, frontier=frontier, alternatives=alternatives, timeline=timeline)


def _alternative(data: Mapping[str, Any]) -> Alternative:
    lists = {name: tuple(data[name]) for name in ("curve", "saved", "recomputed")}
    return Alternative(**{**data, **lists, "devices": tuple(map(tuple, data["devices"]))})


def _fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in dataclasses.fields(kind))


def _columns(rows: Iterable[Any], names: Sequence[str], strings: dict[str, int]) -> dict[str, Any]:
    """Rows as columns; ``texts`` names those that hold numbers of texts."""
    items = list(rows)
    columns: dict[str, list[Any]] = {name: [getattr(item, name) for item in items] for name in names}
    # A column is of one type, so its first item tells whether it has texts.
    texts = [name for name, column in columns.items() if column and isinstance(column[0], str)]
    for name in texts:
        columns[name] = [strings.setdefault(text, len(strings)) for text in columns[name]]
    return {"texts": texts, **columns}


def _rows(columns: Mapping[str, Any], strings: Sequence[str]) -> list[tuple[Any, ...]]:
    texts = set(columns["texts"])
    lists = [
        [strings[number] for number in column] if name in texts else column
        for name, column in columns.items()
        if name != "texts"
    ]
    return list(zip(*lists, strict=True))


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
    all_modules = list(modules)
    alike = Counter(module.fingerprint for module in all_modules)
    # The forward first, so that a value's computation comes before its recomputation.
    for module in sorted(all_modules, key=lambda module: module.phase is not Phase.FORWARD):
        file = first.setdefault(module.fingerprint, f"stage_{module.stage}.{module.phase}.py")
        # Modules that do the same work have one text, under the file of the first.
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
