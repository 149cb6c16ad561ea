"""The plan: all decisions of a compilation, as a value that can be printed."""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.codegen import Program, StageModule, program_text, stage_text
from roundpipe_fx.ir.alternative_plans import Alternatives, PlansInTiles, merge_frontiers
from roundpipe_fx.ir.decisions import CPU_RATES, Decisions, tiles_text
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.chain_search import search
from roundpipe_fx.remat.frontier_plans import record_frontier
from roundpipe_fx.report.memory_snapshot import changes_of_pipeline, changes_of_step, write_snapshot
from roundpipe_fx.report.plan_details import EmittedStep, PlanDetails
from roundpipe_fx.report.plan_json import fields_of_json, json_of_plan
from roundpipe_fx.report.plan_page import page_of_plans, show_page
from roundpipe_fx.report.plan_text import explained, header_lines, stage_lines
from roundpipe_fx.report.summary import division_lines, summary_lines
from roundpipe_fx.report.timeline import Timeline
from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import Timing
from roundpipe_fx.torch_private import recorded_history

_MOST_ACTIONS = 100_000
"""Of the timeline that a page draws, and that is stored."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Decisions):
    """All decisions of one compilation. ``print(plan)`` sums them up, :meth:`details` lists them by stage, and
    :meth:`write` writes the emitted code.

    What was decided are the attributes of :class:`roundpipe_fx.ir.decisions.Decisions`. In addition there are

    Attributes:
        modules: the emitted stage modules.
        programs: the programs that call them: forward, and backward when training.
        read_operations: gives what the plan was made from; ``None`` without a budget.
        read_step: gives memory over the step, and where values stand in the emitted code; ``None`` without programs.
        read_in_tiles: gives what plans in tiles reach; ``None`` without a budget, or where none are looked for.
        stored: what :meth:`look_into` tells of a plan that was read from JSON.
        alternatives: of a pipeline, the plans of its frontier; others search for them when :meth:`look_into` asks.
        timing: when each action would run, if pipelined.
        measured: when the actions of the latest step ran, once there was one, for each device.
        read_corrected: gives a pipeline's makespan with the seconds that its stages took in the latest step; ``None``
            before one.
        compilation: identity of the compilation; a later plan of the same one takes the place of this one.
    """

    modules: tuple[StageModule, ...] = field(compare=False)
    programs: tuple[Program, ...] = field(compare=False)
    read_operations: Callable[[], OperationGraph] | None = field(compare=False, default=None)
    read_step: Callable[[], EmittedStep] | None = field(compare=False, default=None)
    read_in_tiles: Callable[[], PlansInTiles] | None = field(compare=False, default=None)
    stored: PlanDetails | None = field(compare=False, default=None)
    alternatives: Alternatives = field(compare=False, default_factory=Alternatives)
    timing: Timing | None = field(compare=False, default=None)
    measured: list[list[list[Span]]] = field(compare=False, default_factory=list)
    read_corrected: Callable[[], float | None] | None = field(compare=False, default=None)
    compilation: object = field(compare=False, default_factory=object)

    def timeline(self) -> Timeline:
        """When each device runs which action: as predicted and, after a step, as measured in the latest one.

        Returns:
            the timeline, in seconds from the step's beginning.

        Raises:
            RuntimeError: the model is not pipelined.
        """
        if self.stored is not None and self.stored.timeline is not None:
            return self.stored.timeline
        if self.timing is None:
            raise RuntimeError(
                "this plan has no timeline: compile with num_microbatches=, devices= or schedule=, and take the plan "
                "of the compiled model."
            )
        names = {value.number: value.name for value in self.pipeline.offloaded} if self.pipeline is not None else {}
        return Timeline.of(self.timing, self.measured[-1] if self.measured else None, names)

    def corrected_makespan(self) -> float | None:
        """Seconds of a step of the pipeline with the seconds that its stages took in the latest step, in place of the
        modelled ones. What remains modelled are waits, and copies to and from the host.

        Returns:
            the seconds; ``None`` before the first step, and if the model is not pipelined.
        """
        return self.read_corrected() if self.read_corrected is not None else None

    def sources(self) -> dict[str, str]:
        """Every emitted module as readable Python, by file name; with what calls them: a program, or a schedule.

        A module that does the same work on the same shapes as an earlier one says so instead of repeating it.

        Returns:
            texts by file name.

        Raises:
            RuntimeError: the plan was read from JSON and has no code.
        """
        if not self.programs:
            raise RuntimeError("a plan that was read from JSON has no code: compile the model to get it.")
        texts: dict[str, str] = {}
        first: dict[str, str] = {}
        for module in self.modules:
            name = f"stage_{module.stage}.{module.phase}.py"
            same = first.setdefault(module.fingerprint, name)
            texts[name] = stage_text(module) if same == name else f"# the same work on the same shapes as {same}\n"
        if self.pipeline is not None:
            texts["schedule.txt"] = f"# {self.pipeline.schedule}\n{self.pipeline.order}\n"
        else:
            programs = [program_text(program, self._describe) for program in self.programs]
            texts["program.py"] = "import torch\n\n\n" + "\n\n".join(programs)
        return texts

    def write(self, folder: str | Path) -> list[Path]:
        """Write what :meth:`sources` returns.

        Args:
            folder: the folder; created if it is missing.

        Returns:
            the files.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for name, text in self.sources().items():
            path = target / name
            path.write_text(text)
            written.append(path)
        return written

    def frontier(self, *, tiles: bool = True) -> list[tuple[int, float]]:
        """The trade-off: (peak bytes, modelled seconds of recomputation), highest peak first.

        Plans in tiles are among them: where ``tiling="auto"`` was given, wherever they pay; else those below the
        lowest peak that is reached without, as a budget in bytes would have them. What their operations take longer in
        tiles is counted as recomputation. They are looked for when it is first asked, which takes seconds for a large
        model.

        Of a pipeline: bytes of the device that needs most, and seconds for a microbatch, of what was looked at.

        Args:
            tiles: whether those in tiles are listed.

        Returns:
            pairs of bytes and seconds.

        Raises:
            RuntimeError: the plan was made without a budget, so no trade-off was looked at.
        """
        if not self.trade_off:
            raise RuntimeError(
                "this plan was made without a budget, so there is no frontier: compile with memory_budget=, for "
                "example 1.0, which recomputes nothing."
            )
        if self.stored is not None:
            in_tiles = {(plan.bytes, plan.seconds) for plan in self.stored.alternatives.plans if plan.tiles}
            return [point for point in self.stored.frontier if tiles or point not in in_tiles]
        return list(self._frontier if tiles else self._frontier_untiled)

    def point(self) -> tuple[int, float]:
        """This plan as :meth:`frontier` counts.

        Returns:
            its peak in bytes, and its modelled seconds of recomputation, with what its operations take longer in tiles.
        """
        alternatives = self.look_into().alternatives if self.tiles else Alternatives()
        if alternatives.chosen is None:
            return self.peak_bytes, self.recompute_seconds
        return self.peak_bytes, alternatives.plans[alternatives.chosen].seconds

    @functools.cached_property
    def operations(self) -> OperationGraph | None:
        """Operations that the plan was made from, for other planners; ``None`` without a budget."""
        return self.read_operations and self.read_operations()

    @functools.cached_property
    def _frontier(self) -> tuple[tuple[int, float], ...]:
        untiled = self._frontier_untiled
        if self._in_tiles is None:
            return untiled
        stored_plans = self._own_alternatives.plans if self.tiles else ()
        tiled = {(plan.bytes, plan.seconds) for plan in (*self._in_tiles.plans.plans, *stored_plans) if plan.tiles}
        if self._in_tiles.anywhere:
            # What recomputes nothing is not given up for tiles, whatever these are modelled to take.
            return (untiled[0], *(point for point in _drop_dominated([*untiled, *tiled]) if point != untiled[0]))
        lowest = min(size for size, _ in untiled)
        return (*untiled, *_drop_dominated(point for point in tiled if point[0] < lowest))

    @functools.cached_property
    def _frontier_untiled(self) -> tuple[tuple[int, float], ...]:
        if self.tiles and self._in_tiles is not None:
            return tuple((plan.bytes, plan.seconds) for plan in self._in_tiles.plans.plans if not plan.tiles)
        if len(self.trade_off) > 1 or self.operations is None or self.pipeline is not None:
            return self.trade_off
        # All fitted as it was, or a step has shown outputs to be dropped, so nothing else was looked at.
        (chosen,) = self.trade_off
        points_untiled = [(item.peak.bytes, item.seconds) for item in search(Blocks(self.operations)).candidates]
        if chosen[1]:
            return _drop_dominated([chosen, *points_untiled])
        return (chosen, *(point for point in points_untiled if point[0] < chosen[0]))

    @functools.cached_property
    def _in_tiles(self) -> PlansInTiles | None:
        return self.read_in_tiles() if self.read_in_tiles is not None else None

    @functools.cached_property
    def _own_alternatives(self) -> Alternatives:
        """The plans that this one was chosen from."""
        if not self.trade_off or self.operations is None or self.pipeline is not None or self.budget is None:
            return Alternatives()
        points = self.trade_off if self.tiles else self._frontier_untiled
        alternatives = record_frontier(self.operations, points, self.budget, self.peak_bytes, self.recompute_seconds)
        if not self.tiles or self._in_tiles is None:
            return alternatives
        longer, tiles = self.operations.seconds - self._in_tiles.seconds, tiles_text(self.tiles)
        plans = (dataclasses.replace(plan, seconds=plan.seconds + longer, tiles=tiles) for plan in alternatives.plans)
        return dataclasses.replace(alternatives, plans=tuple(plans))

    def look_into(self) -> PlanDetails:
        """Details that the page of :meth:`write_html` and :meth:`to_json` show beside the decisions: memory at each
        operation of the step and the values alive then, their lines in the emitted code, the other plans of the
        frontier, the timeline of a pipeline.

        It is worked out when it is first asked for: the frontier's plans are searched for again, which takes seconds
        for a large model.

        Returns:
            the details, as plain data.
        """
        drawn = self.timing is not None and self.timing.schedule.size <= _MOST_ACTIONS
        timeline = self.timeline() if drawn else None
        return self.stored or dataclasses.replace(self._details, timeline=timeline)

    @functools.cached_property
    def _details(self) -> PlanDetails:
        alternatives, frontier = self.alternatives, self._frontier if self.trade_off else ()
        if frontier and self.pipeline is None:
            shown = set(frontier)
            parts = [self._own_alternatives, *([self._in_tiles.plans] if self._in_tiles is not None else [])]
            alternatives = merge_frontiers(parts, lambda plan: (plan.bytes, plan.seconds) in shown)
        step = self.read_step() if self.read_step is not None else None
        return PlanDetails(step=step, frontier=frontier, alternatives=alternatives)

    def explain(self, name: str) -> str:
        """Explain what happens to a value, or to all values of a module, and what the alternative would cost.

        Args:
            name: name of a value in the emitted code, or of a module as in ``model.named_modules()``.

        Returns:
            the explanation, a line for each value.

        Raises:
            ValueError: there is no such value or module; the message lists close matches.
        """
        return explained(self, name)

    def write_html(self, path: str | Path, *, compare_with: Plan | None = None) -> Path:
        """Write a page to explore the plan with: one file that needs no network.

        It shows memory over the step with the values alive at each moment; every value with what happens to it, what
        the alternative would cost and its lines; the plans of the frontier; the timeline of a pipeline. For a large
        model, writing it takes seconds: see :meth:`look_into`.

        Args:
            path: the file to write.
            compare_with: another plan, which the page compares this one with.

        Returns:
            the path.
        """
        target = Path(path)
        target.write_text(self._page(compare_with), encoding="utf-8")
        return target

    def write_snapshot(self, path: str | Path) -> Path:
        """Write the planned memory of a step for PyTorch's memory visualizer, https://pytorch.org/memory_viz: drop the
        file there.

        The format is that of ``torch.cuda.memory._dump_snapshot``. Trace 0 is the planned step, in which a value has
        two frames: its line in the emitted code, and module and line of the user's program. It begins without what was
        allocated before the step, and ends while the last operation runs. Of a pipeline, trace ``i`` is planned device
        ``i``, of which only the bytes during each action are known.

        If ``torch.cuda.memory._record_memory_history`` is on, the traces that the allocator has recorded are in the
        file too, behind the planned ones: of CUDA device ``i`` trace ``i + 1``, or of a pipeline ``i`` plus the number
        of its devices. Call it in the process that recorded them, also after an out-of-memory error.

        Args:
            path: the file to write, as ``"step.pickle"``.

        Returns:
            the path.

        Raises:
            RuntimeError: memory over the step is not known: the plan was read from JSON without it.
        """
        if self.pipeline is not None:
            if self.timing is None and (self.stored is None or self.stored.timeline is None):
                raise RuntimeError(
                    "this plan of a pipeline was read from JSON, which has no timeline for schedules of more than "
                    f"{_MOST_ACTIONS} actions: write the snapshot of the plan in the process that made it."
                )
            planned = changes_of_pipeline(self.timeline(), self.stages)
        else:
            step = self.stored.step if self.stored is not None else self.read_step and self.read_step()
            if step is None:
                raise RuntimeError("this plan was stored without its programs, so memory over the step is not known.")
            planned = [changes_of_step(step)]
        return write_snapshot(path, planned, recorded_history())

    def show(self, *, compare_with: Plan | None = None) -> Any:
        """Show the page of :meth:`write_html`: in the notebook's cell, or in a browser, from a temporary file whose
        path is printed. Without a display, the path is all there is.

        Args:
            compare_with: another plan, which the page compares this one with.

        Returns:
            in a notebook what displays the page; else ``None``.
        """
        return show_page(self._page(compare_with))

    def _page(self, compare_with: Plan | None) -> str:
        if compare_with is None:
            return page_of_plans([self.to_json()], ["roundpipe_fx plan"])
        return page_of_plans([self.to_json(), compare_with.to_json()], ["this plan", "beside"])

    def to_json(self) -> str:
        """The plan as JSON, without the emitted code, which :meth:`from_json` reads.

        Returns:
            the text.
        """
        return json_of_plan(self, self.look_into())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by :meth:`to_json`. It is equal to the original, but has no code.

        Returns:
            the plan.

        Raises:
            ValueError: ``text`` is not a plan, or has another format.
        """
        try:
            return cls(**fields_of_json(text))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not a roundpipe_fx plan: {error}") from error

    def _describe(self, module: StageModule) -> str:
        return f"stage {module.stage} {module.phase}: {self.stages[module.stage].modules}"

    def details(self) -> str:
        """All decisions as text: for each stage its modelled milliseconds, and its largest values by what happens to
        them.

        Returns:
            the text, with some ten lines a stage.
        """
        lines = header_lines(self, self._corrected_shown())
        if self.pipeline is not None and self.pipeline.mesh is not None:
            lines += division_lines(self.pipeline.mesh)
        offloaded = {value.name for value in self.pipeline.offloaded} if self.pipeline is not None else {*self.on_host}
        for stage in self.stages:
            lines += stage_lines(stage, self.training, offloaded)
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join(summary_lines(self, self._corrected_shown()))

    def _corrected_shown(self) -> float | None:
        """The corrected makespan of a GPU's plan: on the CPU, workers share cores, and seconds say little."""
        return None if self.rates == CPU_RATES else self.corrected_makespan()

    def __repr__(self) -> str:
        return f"<{header_lines(self)[0]}; predicted peak {bytes_text(self.peak_bytes)}>"

    def _repr_html_(self) -> str:
        return (
            f"<pre>{html.escape(str(self))}</pre>"
            f"<details><summary>every stage</summary><pre>{html.escape(self.details())}</pre></details>"
        )


def _drop_dominated(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Points that no other beats in both, highest peak first."""
    best: list[tuple[int, float]] = []
    for size, seconds in sorted(points, key=lambda point: (point[1], point[0])):
        if not best or size < best[-1][0]:
            best.append((size, seconds))
    return tuple(best)
