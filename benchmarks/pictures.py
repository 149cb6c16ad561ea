"""The pictures of the documentation, drawn from what is run or planned here: python -m benchmarks.pictures

- ``memory_curve.svg``: live bytes after each operation of a training step, eager, compiled without a budget and within
  one: measured, with one pass over each step.
- ``clock_table.svg``: who runs what when in a pipeline, with devices that take equally long for each stage.
- ``way_in.svg``: from the user's call to the step, as a sequence diagram.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import roundpipe_fx
from benchmarks.page import DOCS
from benchmarks.side_by_side import build, cases
from roundpipe_fx.report.timeline import Timeline
from roundpipe_fx.schedules import ActionKind, StepCosts, chain, one_f_one_b, simulate_time, with_recompute
from roundpipe_fx.schedules.timing import Timing

PICTURES = DOCS / "pictures"
matplotlib.rcParams["svg.hashsalt"] = "roundpipe_fx"  # the same picture is the same file
matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: smaller, and it can be searched
_COLORS = {ActionKind.FORWARD: "#4c78a8", ActionKind.RECOMPUTE: "#f58518", ActionKind.BACKWARD: "#54a24b"}

_SECONDS = {ActionKind.FORWARD: 1.0, ActionKind.RECOMPUTE: 1.0, ActionKind.BACKWARD: 2.0}


class _LiveBytes(TorchDispatchMode):
    """Bytes of live storages after each operation, beyond those that there were."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.curve: list[int] = []
        self._sizes: dict[int, int] = {}

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch.compile skips frames under other modes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {value.untyped_storage()._cdata for value in tree_leaves((args, kwargs)) if _is_dense(value)}
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if _is_dense(value) and (key := value.untyped_storage()._cdata) not in known | self._sizes.keys():
                self._sizes[key] = value.untyped_storage().nbytes()
                weakref.finalize(value.untyped_storage(), self._sizes.pop, key, None)
        self.curve.append(sum(self._sizes.values()))
        return result


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def live_bytes(model: nn.Module, batch: dict[str, Any]) -> list[int]:
    """Bytes of live tensors after each operation of a training step: the second one, in which nothing is compiled."""
    model(**batch).loss.backward()
    model.zero_grad()
    gc.collect()
    with _LiveBytes() as live:
        model(**batch).loss.backward()
    return live.curve


def memory_curve() -> Figure:
    """Live bytes over a step of a GPT-2: eager, compiled, and within two budgets."""
    case = next(case for case in cases() if case.name == "GPT-2")
    batch = case.make_batch()
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for name, options in (
        ("eager", None),
        ("compiled, nothing recomputed", {"memory_budget": 1.0}),
        ("a share of 0.3", {"memory_budget": 0.3}),
        ("the lowest peak", {"memory_budget": 0.0}),
    ):
        model = build(case)
        run = model if options is None else roundpipe_fx.compile(model, **options)
        curve = live_bytes(run, batch)
        places = [100 * place / len(curve) for place in range(len(curve))]
        (line,) = axes.plot(places, [size / 2**20 for size in curve], lw=1.4, label=name)
        if options is not None and options["memory_budget"] < 1:
            axes.axhline(run.plan.budget / 2**20, color=line.get_color(), ls=":", lw=1)
    axes.set(xlabel="operations of the step, %", ylabel="live MiB", xlim=(0, 100), ylim=(0, None))
    axes.legend(frameon=False)
    _plain(axes)
    return figure


def timing(devices: int = 4, microbatches: int = 8) -> Timing:
    """1F1B with recomputation, every stage alike: a backward takes as long as two forwards."""
    graph = chain(devices, recompute=True)
    costs = StepCosts(seconds={step: _SECONDS[step[0]] for step in graph.steps})
    return simulate_time(with_recompute(one_f_one_b(devices, devices, microbatches), graph), graph, costs)


def clock_table() -> Figure:
    """Who runs what when."""
    timed = timing()
    figure = Figure(figsize=(10, 2.4), layout="constrained")
    axes = figure.add_subplot()
    bars = Timeline.of(timed, None, {}).predicted
    for bar in bars:
        device, middle = bar.device, (bar.start + bar.end) / 2
        axes.barh(
            device, bar.end - bar.start, left=bar.start, color=_COLORS[bar.action.kind], edgecolor="white", lw=0.8
        )
        axes.text(middle, device, str(bar.action.microbatch), ha="center", va="center", color="white", size=8)
    devices = range(1 + max(bar.device for bar in bars))
    axes.set(yticks=devices, xlabel="time, in forwards", xlim=(0, timed.makespan))
    axes.set_yticklabels([f"device {device}" for device in devices])
    axes.invert_yaxis()
    for kind, color in _COLORS.items():
        axes.barh(0, 0, color=color, label=kind.name.lower())
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), handlelength=1)
    _plain(axes)
    return figure


_WHO = ("your loop", "compiled model", "Dynamo", "AOTAutograd", "api/compilation", "passes, planner", "runtime")
_ARROW = {"arrowstyle": "->", "color": "#4c78a8", "shrinkA": 0, "shrinkB": 0}
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}
_SAID = (
    (0, 1, "model(**batch)"),
    (1, 2, "forward, under our options"),
    (2, 4, "FX graph of the model, fake inputs"),
    (4, 3, "capture"),
    (3, 4, "joint graph: partition it"),
    (4, 5, "joint graph, options, what steps have shown"),
    (5, 4, "plan; programs of forward and backward"),
    (4, 3, "graphs that call the stages"),
    (3, 2, "a function with autograd around both"),
    (2, 6, "run the forward; guards keep the function"),
    (6, 0, "outputs"),
    (0, 6, "loss.backward(): autograd runs the backward"),
    (6, 1, "sizes seen, for the next plan"),
)


def way_in() -> Figure:
    """From the user's call to the step."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.add_subplot()
    for place, name in enumerate(_WHO):
        axes.text(place, -0.9, name, ha="center", va="center", size=9, weight="bold")
        axes.plot([place, place], [-0.5, len(_SAID)], color="#999", lw=0.8, ls="--")
    for row, (sender, receiver, text) in enumerate(_SAID):
        axes.annotate("", (receiver, row + 0.5), (sender, row + 0.5), arrowprops=_ARROW)
        axes.text((sender + receiver) / 2, row + 0.42, text, ha="center", va="bottom", size=8, bbox=_BEHIND, zorder=0.5)
    axes.set(xlim=(-0.6, len(_WHO) - 0.4), ylim=(len(_SAID), -1.3))
    axes.axis("off")
    return figure


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for draw in (memory_curve, clock_table, way_in):
        draw().savefig(PICTURES / f"{draw.__name__}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
