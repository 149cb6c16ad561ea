"""Plots of stored results for the documentation's page of benchmarks; ``python -m benchmarks.page`` draws them.

- ``lowest_peaks.svg``: the lowest measured peak of each way to train a model, as a share of eager's.
- ``step_times.svg``: seconds of a step beside each peer's, at the peer's peak.
- ``heavy_head.svg``: modelled seconds of a pipeline's step, by schedule.
"""

from __future__ import annotations

import json
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.side_by_side import RESULTS

matplotlib.rcParams["svg.hashsalt"] = "roundpipe_fx"  # the same picture is the same file
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and it can be searched
_PEERS = {
    "eager": "#7f7f7f",
    "checkpoint per block": "#f58518",
    "activation_memory_budget": "#54a24b",
    "rotor": "#9467bd",
}
_OWN = "#4c78a8"


def _rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return found


def lowest_peaks() -> Figure:
    """Bars of each model: roundpipe_fx below its peers, and what no schedule can beat."""
    peers, lowest = _rows("frontier_peers"), _rows("frontier_lowest")
    figure, axes = _figure([row["model"] for row in lowest], height=5.2)
    thick = 0.8 / (len(_PEERS) + 1)
    for place, own in enumerate(lowest):
        of_model = [row for row in peers if row["model"] == own["model"]]
        peaks = {
            kind: min((row["peak MB"] for row in of_model if row["peer"].startswith(kind)), default=None)
            for kind in _PEERS
        }
        whole = peaks["eager"]
        bars = [*((kind, peak, _PEERS[kind]) for kind, peak in peaks.items()), ("roundpipe_fx", own["ours MB"], _OWN)]
        for row, (name, peak, color) in enumerate(bars):
            if peak is not None:
                label = name if place == 0 else None
                axes.barh(place + (row - 2) * thick, 100 * peak / whole, thick, color=color, label=label)
        bound = 100 * own["lower bound MB"] / whole
        at = [place + 1.5 * thick, place + 2.5 * thick]
        axes.plot([bound, bound], at, color="black", lw=1.5, label="no schedule can beat" if place == 0 else None)
    axes.set(xlabel="lowest measured peak, % of eager's", xlim=(0, None))
    _legend(axes)
    return figure


def step_times() -> Figure:
    """A dot for each peer that was timed: left of 1, a step of roundpipe_fx within the peer's peak takes less."""
    rows = [row for row in _rows("frontier_peers") if row["step ratio"] is not None]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = _figure(models, height=3.6)
    named: set[str] = set()
    for row in rows:
        place = models.index(row["model"])
        kind = next(kind for kind in _PEERS if row["peer"].startswith(kind))
        axes.plot(row["step ratio"], place, "o", color=_PEERS[kind], label=None if kind in named else kind)
        axes.plot(row["least step ratio"], place, "|", color=_PEERS[kind], ms=11)
        named.add(kind)
    axes.plot([], [], "|", color="black", ms=11, label="operators alone, each once")
    axes.axvline(1, color="black", lw=0.8, ls=":")
    axes.set(xlabel="seconds of a step / the peer's, at the peer's peak", ylim=(len(models) - 0.5, -0.5))
    _legend(axes)
    return figure


def heavy_head() -> Figure:
    """Bars of each schedule, with and without recomputation."""
    rows = _rows("pipeline_heavy_head")
    schedules = list(dict.fromkeys(row["schedule"] for row in rows))
    figure, axes = _figure(schedules, height=2.8)
    for row in rows:
        always = row["checkpoint"] == "always"
        place = schedules.index(row["schedule"]) + (-0.19 if always else 0.19)
        first = row["schedule"] == schedules[0]
        label = f"checkpoint={row['checkpoint']!r}" if first else None
        axes.barh(place, row["modelled s"], 0.36, color="#f58518" if always else _OWN, label=label)
        axes.text(row["modelled s"], place, f"  {row['highest peak GiB']:.1f} GiB", va="center", size=8)
    longest = max(row["modelled s"] for row in rows)
    axes.set(
        xlabel="modelled seconds of a step; beside the bars the highest peak of a device", xlim=(0, 1.15 * longest)
    )
    _legend(axes)
    return figure


def _figure(names: list[str], height: float) -> tuple[Figure, Axes]:
    """A figure with a row for each name, the first one at the top."""
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _legend(axes: Axes) -> None:
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1), handlelength=1, fontsize=9)


PLOTS = {draw.__name__: draw for draw in (lowest_peaks, step_times, heavy_head)}
"""By the name of the file."""
