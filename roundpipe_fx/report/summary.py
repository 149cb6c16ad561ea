"""The summary of a plan: what ``print(plan)`` shows, on one screen for any depth of the model.

Modules that differ only in their numbers are shown as one, ``model.layers.*.mlp``: the blocks of a model are alike, and
so is what is decided about them.

With it comes the table of the ways to divide devices among which a plan's was chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.ir.decisions import Decisions, LiveValue, PlannedDivision, PlannedMesh, PlannedStage, PlannedValue
from roundpipe_fx.report.plan_text import header_lines

T = TypeVar("T")

_ROWS = 6
"""Rows of the tables of modules and stages. With titles, last rows and the header there are 40 lines at most."""
_FEWER_ROWS = 3
"""The same where there is a table of divisions of devices, which has as many rows as these tables then lack."""
_REASONS = 2
"""Rows of the table of hoisted values."""
_NUMBER = re.compile(r"(?<![^. ])\d+(?![^. ])")


def summary_lines(plan: Decisions, corrected: float | None = None) -> list[str]:
    """The lines of the summary: the header; what is alive at the peak; stages; the costliest recomputations; hoisted
    values.

    Args:
        corrected: seconds of a step, where stages were measured.

    Returns:
        at most 40 lines.
    """
    # The table of divisions takes rows, so the other tables get fewer: the summary has at most 40 lines.
    mesh = plan.pipeline.mesh if plan.pipeline is not None else None
    divisions = division_lines(mesh, _ROWS) if mesh is not None else []
    limit = _FEWER_ROWS if divisions else _ROWS
    lines = [*header_lines(plan, corrected), *divisions, *_alive(plan, limit), *_stages(plan, limit)]
    values = [value for stage in plan.stages for value in stage.recomputed]
    lines += _recomputed(values, limit)
    lines += _hoisted([value for stage in plan.stages for value in stage.hoisted])
    return lines


def fold_path(module: str) -> str:
    """The path of a module with ``*`` in place of numbers: ``model.layers.*.mlp``."""
    return _NUMBER.sub("*", module)


def _alive(plan: Decisions, limit: int) -> list[str]:
    live = plan.peak.live
    if not live:
        return []
    # Gradients are one row; other values are grouped by their module, with numbers of layers folded.
    named = {"gradients": [value for value in live if value.gradient]}
    groups = _group_by(
        (value for value in live if not value.gradient),
        lambda value: fold_path(value.module) or value.line or value.name,
    )
    named |= {_module(group) or name: group for name, group in groups.items()}
    rows = [(sum(value.bytes for value in group), f"{name}{_count(group)}") for name, group in named.items() if group]
    total = sum(size for size, _ in rows)
    rows.sort(key=lambda row: -row[0])
    shown = [f"  {bytes_text(size):>10}  {text}" for size, text in rows[:limit]]
    rest = sum(size for size, _ in rows[limit:])
    return [
        f"alive at the peak: {bytes_text(total)} in {len(live)} values",
        *shown,
        *_rest(rows, f"{bytes_text(rest)} of other modules", limit),
    ]


def _stages(plan: Decisions, limit: int) -> list[str]:
    # Stages are alike if their modules are, but for numbers, and what was decided about them.
    groups = list(_group_by(plan.stages, lambda stage: (fold_path(stage.modules), _decisions(stage))).values())
    lines = ["stages, those alike as one:"]
    for stages in groups[:limit]:
        numbers = ", ".join(str(stage.index) for stage in stages[:4]) + (", …" if len(stages) > 4 else "")
        count = f" ({len(stages)} stages)" if len(stages) > 1 else ""
        name = stages[0].modules if len(stages) == 1 else fold_path(stages[0].modules)
        lines.append(f"  {numbers}{count}: {name}; {_decisions(stages[0])}")
    return [*lines, *_rest(groups, f"and {sum(map(len, groups[limit:]))} more: plan.details()", limit)]


def _decisions(stage: PlannedStage) -> str:
    parts = [
        f"{title} {bytes_text(sum(value.bytes for value in values))}"
        for title, values in (("saves", stage.saved), ("hoists", stage.hoisted))
        if values
    ]
    if stage.recompute_seconds:
        parts.append(f"recomputes {stage.recompute_seconds * 1e3:.3f} of {stage.forward_seconds * 1e3:.3f} ms")
    elif stage.forward_seconds:
        parts.append(f"forward {stage.forward_seconds * 1e3:.3f} ms")
    else:  # of a schedule that cuts backwards elsewhere than forwards
        parts.append(f"backward {stage.backward_seconds * 1e3:.3f} ms")
    return ", ".join(parts)


def _recomputed(values: Sequence[PlannedValue], limit: int) -> list[str]:
    groups = _group_by(values, lambda value: (fold_path(value.module), value.line))
    rows = []
    for (_, line), group in groups.items():
        seconds = sum(value.seconds * max(value.times, 1) for value in group)
        where = ", ".join(part for part in (_module(group), line) if part) or group[0].name
        held = bytes_text(sum(value.bytes for value in group))
        rows.append(
            (seconds, f"{where}{_count(group)}, saved, {'it' if len(group) == 1 else 'they'} would hold {held}")
        )
    rows.sort(key=lambda row: -row[0])
    if not rows:
        return []
    shown = [f"  {seconds * 1e3:>10.3f}  {text}" for seconds, text in rows[:limit]]
    rest = sum(seconds for seconds, _ in rows[limit:])
    return ["costliest recomputations, ms:", *shown, *_rest(rows, f"{rest * 1e3:.3f} ms of others", limit)]


def _hoisted(values: Sequence[PlannedValue]) -> list[str]:
    groups = _group_by(values, lambda value: (value.reason, fold_path(value.module)))
    if not groups:
        return []
    rows = []
    for (reason, _), group in groups.items():
        where = _module(group) or group[0].line or group[0].name
        rows.append(f"  {where}{_count(group)}, {bytes_text(sum(value.bytes for value in group))}: {reason}")
    return ["computed once a step, never repeated:", *rows[:_REASONS], *_rest(rows, "others", _REASONS)]


def _group_by(items: Iterable[T], key: Callable[[T], object]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def _module(values: Sequence[PlannedValue | LiveValue]) -> str:
    """The path of the module of some values, folded if they are of several."""
    paths = {value.module for value in values}
    return paths.pop() if len(paths) == 1 else fold_path(values[0].module)


def _count(items: Sequence[object]) -> str:
    return f" ({len(items)} values)" if len(items) > 1 else ""


def _rest(rows: Sequence[object], text: str, shown: int) -> list[str]:
    return [f"  … {text}"] if len(rows) > shown else []


def division_lines(mesh: PlannedMesh, limit: int | None = None) -> list[str]:
    """The table: the chosen division, then by seconds those that fit, then the others by bytes.

    Args:
        mesh: any; without divisions there is no table.
        limit: number of divisions that are listed at most; ``None``: all.
    """
    if not mesh.divisions:
        return []
    ordered = sorted(mesh.divisions, key=_key)
    devices = f"{ordered[0].pipeline * ordered[0].replicas} "
    devices += f"groups of {mesh.tensor_parallel} devices" if mesh.tensor_parallel > 1 else "devices"
    planned = sum(division.planned for division in ordered)
    shown = ordered if limit is None else ordered[:limit]
    lines = [
        f"ways to divide {devices}: {len(ordered)}, of which {planned} planned; {_proof(ordered)}",
        "    replicas x devices          stages  schedule         ms a step  fullest device",
        *map(_row, shown),
    ]
    return lines if len(shown) == len(ordered) else [*lines, f"  … {len(ordered) - len(shown)} more: plan.details()"]


def _key(division: PlannedDivision) -> tuple[bool, bool, float, int, int]:
    seconds = division.seconds if division.seconds is not None else 0.0
    return not division.chosen, not division.fits, seconds, division.bytes, division.pipeline


def _proof(ordered: list[PlannedDivision]) -> str:
    """Return whether a division that was not planned may have a shorter step."""
    # A division that was not planned, but has a lower bound above the chosen one's seconds, is proved to be slower.
    chosen = ordered[0].seconds or 0.0
    open_ones = [
        division
        for division in ordered
        if not division.planned and division.seconds is not None and division.seconds < chosen
    ]
    if open_ones:
        return f"{len(open_ones)} that were not planned may take less"
    return "the others take longer at the least (≥), or do not fit"


def _row(division: PlannedDivision) -> str:
    bound_mark = "" if division.planned else "≥ "
    seconds = f"{bound_mark}{division.seconds * 1e3:.3f}" if division.seconds is not None else "does not fit"
    size = f"{bound_mark}{bytes_text(division.bytes)}"
    mesh = f"{division.replicas} x {division.pipeline}"
    mark, share = "*" if division.chosen else " ", "sharded" if division.sharded else ""
    return f"  {mark} {mesh:>18}  {share:<7}  {division.stages:>6}  {division.schedule:<12} {seconds:>13}  {size:>14}"
