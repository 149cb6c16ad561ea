"""The plan: all decisions of a compilation, as a value that can be printed."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundpipe_fx.analysis.operations import OperationGraph
from roundpipe_fx.analysis.simulator import LiveValue, PeakMoment
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.codegen import Program, StageModule, program_text, stage_text
from roundpipe_fx.remat.blocks import Blocks
from roundpipe_fx.remat.search import search
from roundpipe_fx.report.timeline import Timeline
from roundpipe_fx.runtime.pipeline_run import Span
from roundpipe_fx.schedules import Timing

__all__ = ["Plan", "PlannedPipeline", "PlannedStage", "PlannedTiles", "PlannedValue"]

_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class PlannedValue:
    """One value of the graph.

    Attributes:
        name: the value's name in the emitted code.
        module: path of the user's module that computes it.
        type: dtype and shape.
        bytes: bytes of its storage; an upper bound if the size depends on data.
        reason: why it was hoisted, or must not be saved; empty otherwise.
        seconds: modelled seconds of computing it once.
        times: how often the backward recomputes it.
        again_seconds: modelled seconds of recomputing it, or of what recomputing it would take if it were not saved,
            including everything that has to run for it.
    """

    name: str
    module: str
    type: str
    bytes: int
    reason: str = ""
    seconds: float = 0.0
    times: int = 0
    again_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlannedTiles:
    """Operations that are carried out on one tile of rows after another.

    Attributes:
        name: the widest value inside, which never exists as a whole.
        module: path of the user's module that computes it.
        type: dtype and shape of the whole.
        bytes: bytes of the whole.
        rows: number of rows.
        tiles: number of tiles.
        seconds: modelled seconds of all tiles.
    """

    name: str
    module: str
    type: str
    bytes: int
    rows: int
    tiles: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """A stage, and what happens to its values.

    Attributes:
        index: position in the pipeline.
        modules: the user's modules in it, first and last.
        segments: indices of its first and last segment.
        forward_seconds: modelled seconds of the forward.
        recompute_seconds: modelled seconds of recomputed operations, early or just in time.
        backward_seconds: modelled seconds of the backward, without recomputation.
        early_seconds: those seconds of both that are spent in the recompute module, before the stage's incoming
            gradients arrive.
        entry_bytes: bytes of computed values that are live across its beginning.
        saved: values saved from forward to backward, without hoisted ones and generator states.
        hoisted: values saved because their operation must not run twice.
        recomputed: values recomputed in the backward.
        replayed: random operations that are recomputed from a saved generator state.
        passing: values of the forward that the backward does not read.
        same_as: an earlier stage that does the same work on the same shapes, if there is one.
    """

    index: int
    modules: str
    segments: tuple[int, int]
    forward_seconds: float
    recompute_seconds: float
    backward_seconds: float
    early_seconds: float
    entry_bytes: int
    saved: tuple[PlannedValue, ...]
    hoisted: tuple[PlannedValue, ...]
    recomputed: tuple[PlannedValue, ...]
    replayed: tuple[PlannedValue, ...]
    passing: tuple[PlannedValue, ...] = ()
    same_as: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedPipeline:
    """How a step is pipelined.

    Attributes:
        schedule: name of the schedule.
        devices: the device of each worker.
        microbatches: number of microbatches of a whole batch.
        checkpoint: which microbatches are recomputed; empty if a byte budget decides.
        makespan: modelled seconds of a step.
            bubble: modelled share of the devices' time that they spend waiting.
        peak_bytes: for each device, peak bytes beyond those allocated when the step began: values of the microbatches
            in flight, gradients, temporaries.
        order: the actions of every device with the transfers between them, one line per device.
        brought_bytes: bytes that a step copies to the devices for an offloaded model; 0 for other models.
        loss_reduction: how the microbatches' losses are combined to the batch's loss.
    """

    schedule: str
    devices: tuple[str, ...]
    microbatches: int
    checkpoint: str
    makespan: float
    bubble: float
    peak_bytes: tuple[int, ...]
    order: str = field(repr=False)
    brought_bytes: int = 0
    loss_reduction: str = "mean"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions of one compilation. ``print(plan)`` shows them; :meth:`write` writes the emitted code.

    Attributes:
        stages: the stages in order.
        segments: how many segments the forward was cut into, and how many structurally different ones.
        recompute: the option it was made with.
        budget: bytes that a step may allocate at most at one time; ``None``: no limit.
        peak: when a step allocates most at one time, predicted by simulating the emitted programs; if pipelined, when
            one microbatch that runs alone does.
        trade_off: (peak bytes, modelled seconds of recomputation) of all plans that were considered; empty without a
            budget.
        assumed: what data-dependent sizes are taken to be, by symbol (the others count with their upper bounds), and
            the bytes that operators allocate for themselves where that depends on data.
        sizes: the largest inputs that it was made for and is used with, by input and dimension; empty where all sizes
            are fixed, or the budget is no number of bytes.
        training: whether there is a backward.
        static: whether all incoming gradients have sizes that are known when compiling.
        outputs: how many values the forward returns to its caller.
        modules: the emitted stage modules.
        programs: the programs that call them: forward, and backward when training.
        read_operations: gives what the plan was made from; ``None`` without a budget.
        tiles: regions that are carried out in tiles; sums over tiles round differently.
        pipeline: how a step is pipelined, if it is; the rest of the plan is then that of one microbatch.
        timing: when each action would run, if pipelined.
        measured: when the actions of the latest step ran, once there was one, for each device.
    """

    stages: tuple[PlannedStage, ...]
    segments: tuple[int, int]
    recompute: str
    budget: int | None
    peak: PeakMoment
    trade_off: tuple[tuple[int, float], ...] = field(repr=False)
    assumed: Mapping[str, int]
    sizes: Mapping[str, int]
    training: bool
    static: bool
    outputs: int
    modules: tuple[StageModule, ...] = field(repr=False, compare=False)
    programs: tuple[Program, ...] = field(repr=False, compare=False)
    read_operations: Callable[[], OperationGraph] | None = field(repr=False, compare=False, default=None)
    tiles: tuple[PlannedTiles, ...] = ()
    pipeline: PlannedPipeline | None = None
    timing: Timing | None = field(repr=False, compare=False, default=None)
    measured: list[list[list[Span]]] = field(repr=False, compare=False, default_factory=list)

    def timeline(self) -> Timeline:
        """When each device runs which action: as predicted and, after a step, as measured in the latest one.

        Raises:
            RuntimeError: the model is not pipelined, or the plan was read from JSON.
        """
        if self.timing is None:
            raise RuntimeError(
                "this plan has no timeline: compile with num_microbatches=, devices= or schedule=, and take the plan "
                "of the compiled model."
            )
        return Timeline.of(self.timing, self.measured[-1] if self.measured else None)

    @property
    def saved_bytes(self) -> int:
        """Bytes of computed values that the forward keeps for the backward, hoisted values and RNG states included."""
        return sum(value.bytes for stage in self.stages for value in (*stage.saved, *stage.hoisted))

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of a step: bytes allocated at most at one time beyond what was allocated when it began.

        The forward's outputs count until the backward is over, since the caller may hold them. Of a pipelined step, the
        bytes of the device that needs most, with all its microbatches in flight: what a budget bounds. (That of one
        microbatch which runs alone is ``peak.bytes``; all devices are in ``pipeline.peak_bytes``.)
        """
        return self.peak.bytes if self.pipeline is None else max(self.pipeline.peak_bytes)

    @property
    def forward_seconds(self) -> float:
        """Modelled seconds of the forward."""
        return sum(stage.forward_seconds for stage in self.stages)

    @property
    def recompute_seconds(self) -> float:
        """Modelled seconds of recomputation in the backward."""
        return sum(stage.recompute_seconds for stage in self.stages)

    def sources(self) -> dict[str, str]:
        """Every emitted module as readable Python, by file name; with what calls them: a program, or a schedule.

        Raises:
            RuntimeError: the plan was read from JSON and has no code.

        A module that does the same work on the same shapes as an earlier one says so instead of repeating it.
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

    def frontier(self) -> list[tuple[int, float]]:
        """The trade-off: (peak bytes, modelled seconds of recomputation), highest peak first.

        Of a pipeline: bytes of the device that needs most, and seconds for a microbatch, of what was looked at.

        Raises:
            RuntimeError: the plan was made without a budget, so no trade-off was looked at.
        """
        if not self.trade_off:
            raise RuntimeError(
                "this plan was made without a budget, so there is no frontier: compile with memory_budget=, for "
                "example 1.0, which recomputes nothing."
            )
        return list(self._frontier)

    @functools.cached_property
    def operations(self) -> OperationGraph | None:
        """What the plan was made from, for other planners; ``None`` without a budget."""
        return self.read_operations and self.read_operations()

    @functools.cached_property
    def _frontier(self) -> tuple[tuple[int, float], ...]:
        if len(self.trade_off) > 1 or self.operations is None or self.pipeline is not None:
            return self.trade_off
        # All fitted as it was, so nothing else was looked at.
        (whole,) = self.trade_off
        found = [(item.peak.bytes, item.seconds) for item in search(Blocks(self.operations)).candidates]
        return (whole, *(point for point in found if point[0] < whole[0]))

    def explain(self, name: str) -> str:
        """What happens to a value, or to all values of a module, and what the alternative would cost.

        Args:
            name: name of a value in the emitted code, or of a module as in ``model.named_modules()``.

        Raises:
            ValueError: there is no such value or module; the message lists close matches.
        """
        fates = list(self._fates())
        found = [fate for fate in fates if fate[2].name == name]
        tiled = [tiles for tiles in self.tiles if tiles.name == name]
        if not found and not tiled:
            found = [fate for fate in fates if fate[2].module == name or fate[2].module.startswith(f"{name}.")]
            tiled = [own for own in self.tiles if own.module == name or own.module.startswith(f"{name}.")]
        if not found and not tiled:
            values: list[PlannedValue | PlannedTiles] = [*(fate[2] for fate in fates), *self.tiles]
            names = {value.name for value in values} | {value.module for value in values}
            close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4)
            hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
            raise ValueError(f"no value and no module named {name!r} in this plan.{hint}")
        texts = [_fate_text(stage, fate, value) for stage, fate, value in found]
        return "\n".join([*texts, *map(_tiled_text, tiled)])

    def _fates(self) -> Iterator[tuple[int, str, PlannedValue]]:
        for stage in self.stages:
            replayed = {value.name for value in stage.replayed}
            for fate in _LISTS:
                for value in getattr(stage, fate):
                    if fate == "replayed" or value.name not in replayed:
                        yield stage.index, fate, value

    def to_json(self) -> str:
        """The plan as JSON, without the emitted code, which :meth:`from_json` reads."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for name in ("modules", "programs", "read_operations", "timing", "measured"):
            del fields[name]
        fields["pipeline"] = dataclasses.asdict(self.pipeline) if self.pipeline is not None else None
        fields["stages"] = [dataclasses.asdict(stage) for stage in self.stages]
        fields["peak"] = dataclasses.asdict(self.peak)
        fields["tiles"] = [dataclasses.asdict(tiles) for tiles in self.tiles]
        return json.dumps({"format": _FORMAT, **fields}, indent=1, default=dict)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by :meth:`to_json`. It is equal to the original, but has no code.

        Raises:
            ValueError: ``text`` is not a plan, or has another format.
        """
        try:
            fields = json.loads(text)
            found = fields.pop("format", None) if isinstance(fields, dict) else None
            if found != _FORMAT:
                raise ValueError(f"format {found!r} is not {_FORMAT!r}")
            live = tuple(LiveValue(**value) for value in fields["peak"].pop("live"))
            fields["peak"] = PeakMoment(**fields["peak"], live=live)
            fields["stages"] = tuple(_stage_from_json(stage) for stage in fields["stages"])
            fields["segments"] = tuple(fields["segments"])
            fields["tiles"] = tuple(PlannedTiles(**tiles) for tiles in fields.get("tiles", ()))
            if fields["pipeline"] is not None:
                lists = {name: tuple(fields["pipeline"][name]) for name in ("devices", "peak_bytes")}
                fields["pipeline"] = PlannedPipeline(**(fields["pipeline"] | lists))
            fields["trade_off"] = tuple((int(size), float(seconds)) for size, seconds in fields["trade_off"])
            return cls(**fields, modules=(), programs=())
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this is not a roundpipe_fx plan: {error}") from error

    def _describe(self, module: StageModule) -> str:
        return f"stage {module.stage} {module.phase}: {self.stages[module.stage].modules}"

    def __str__(self) -> str:
        kind = "inference"
        if self.training:
            kind = f"recompute={self.recompute!r}, training" if self.budget is None else "training within a budget"
        total, different = self.segments
        lines = [f"roundpipe_fx plan: {len(self.stages)} stages of {total} segments ({different} different), {kind}"]
        if self.budget is not None:
            lines.append(f"budget: {bytes_text(self.budget)} ({self.budget} bytes)")
        if self.pipeline is not None:
            lines += _pipeline_lines(self.pipeline)
        where = f"in {self.peak.call} at {self.peak.value}" if self.peak.call else "at the beginning"
        module = f" of {self.peak.module}" if self.peak.module else ""
        what = "predicted peak" if self.pipeline is None else "of one microbatch alone, predicted peak"
        lines.append(f"{what}: {bytes_text(self.peak.bytes)} ({self.peak.bytes} bytes), {where}{module}")
        if self.training:
            lines.append(
                f"saved for the backward: {bytes_text(self.saved_bytes)}; recomputed: "
                f"{self.recompute_seconds * 1e3:.3f} ms modelled (forward {self.forward_seconds * 1e3:.3f} ms)"
            )
        if self.tiles:
            lines.append(f"carried out in tiles, so sums round differently: {_tiles_text(self.tiles)}")
        if self.sizes:
            lines.append(f"made for sizes up to: {', '.join(f'{name} ≤ {size}' for name, size in self.sizes.items())}")
        if self.assumed:
            sizes = ", ".join(f"{symbol} ≤ {size}" for symbol, size in self.assumed.items())
            lines.append(f"depends on data, as seen plus headroom: {sizes}")
        for stage in self.stages:
            same = f"  (same as stage {stage.same_as})" if stage.same_as is not None else ""
            lines.append(f"stage {stage.index}: {stage.modules}{same}")
            seconds = f"  modelled ms: forward {stage.forward_seconds * 1e3:.3f}"
            if self.training:
                seconds += (
                    f", recompute {stage.recompute_seconds * 1e3:.3f}, backward {stage.backward_seconds * 1e3:.3f}"
                )
            if stage.early_seconds:
                seconds += f", of which before its gradients arrive {stage.early_seconds * 1e3:.3f}"
            lines.append(f"{seconds}; enters {bytes_text(stage.entry_bytes)}")
            for title in ("saved", "hoisted", "recomputed", "replayed"):
                lines += _listing(title, getattr(stage, title))
        return "\n".join(lines)


_FORMAT = "roundpipe_fx plan 3"


def _tiles_text(tiles: Sequence[PlannedTiles]) -> str:
    """What is tiled, in one line; what is tiled alike is named once."""
    alike: dict[tuple[str, int], list[PlannedTiles]] = {}
    for own in tiles:
        alike.setdefault((own.type, own.tiles), []).append(own)
    parts = []
    for (kind, count), same in alike.items():
        modules = list(dict.fromkeys(own.module or "the model" for own in same))
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        parts.append(f"{modules[0]}{more} ({kind}, {bytes_text(same[0].bytes)}) in {count} tiles")
    return "; ".join(parts)


def _tiled_text(tiles: PlannedTiles) -> str:
    where = f" in {tiles.module}" if tiles.module else ""
    return (
        f"{tiles.name} {tiles.type}{where}: computed in {tiles.tiles} tiles of its {tiles.rows} rows, one after "
        f"another, in {tiles.seconds * 1e3:.3f} ms with the operations around it; as a whole it would hold "
        f"{bytes_text(tiles.bytes)}"
    )


def _pipeline_lines(pipeline: PlannedPipeline) -> list[str]:
    again = f", checkpoint={pipeline.checkpoint!r}" if pipeline.checkpoint else ""
    peaks = ", ".join(bytes_text(size) for size in pipeline.peak_bytes[:_SHOWN])
    more = f", … {len(pipeline.peak_bytes) - _SHOWN} more" if len(pipeline.peak_bytes) > _SHOWN else ""
    brought = (
        [f"the model is on the host: a step copies {bytes_text(pipeline.brought_bytes)} of it to the devices"]
        if pipeline.brought_bytes
        else []
    )
    return [
        f"pipelined: {pipeline.microbatches} microbatches by schedule {pipeline.schedule!r} on "
        f"{len(pipeline.devices)} devices{again}; {_REDUCTIONS[pipeline.loss_reduction]}",
        f"a step: {pipeline.makespan * 1e3:.3f} ms modelled, bubble {pipeline.bubble:.1%}; predicted peaks of the "
        f"devices: {peaks}{more}",
        *brought,
    ]


_REDUCTIONS = {
    "mean": "the loss is the mean of the microbatches' losses, weighed by their rows",
    "sum": "the loss is the sum of the microbatches' losses",
}


def _stage_from_json(fields: dict[str, Any]) -> PlannedStage:
    lists = {name: tuple(PlannedValue(**value) for value in fields[name]) for name in _LISTS}
    return PlannedStage(**(fields | lists | {"segments": tuple(fields["segments"])}))


_LISTS = ("saved", "hoisted", "recomputed", "replayed", "passing")


def _fate_text(stage: int, fate: str, value: PlannedValue) -> str:
    again = f"{value.again_seconds * 1e3:.3f} ms"
    size = bytes_text(value.bytes)
    text = {
        "saved": f"saved from forward to backward, {size}; recomputing it instead would take {again}",
        "hoisted": f"saved from forward to backward, {size}, and never recomputed: {value.reason}",
        "recomputed": (
            f"recomputed in the backward {_times(value.times)}, in {again}; saving it instead would hold {size}"
            f"{', but it must not be saved: ' if value.reason else ''}{value.reason}"
        ),
        "replayed": (
            f"replayed in the backward {_times(value.times)} from its saved generator state, in {again}; saving it "
            f"instead would hold {size}"
        ),
        "passing": f"needed only by the forward, {size} while it is alive",
    }[fate]
    where = f" in {value.module}" if value.module else ""
    return f"{value.name} {value.type}{where} (stage {stage}): {text}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _listing(title: str, values: Sequence[PlannedValue]) -> list[str]:
    if not values:
        return []
    lines = [f"  {title}: {len(values)} values, {bytes_text(sum(value.bytes for value in values))}"]
    for value in sorted(values, key=lambda value: -value.bytes)[:_SHOWN]:
        where = f" in {value.module}" if value.module else ""
        reason = f" — {value.reason}" if value.reason else ""
        lines.append(f"    {value.name} {value.type} {bytes_text(value.bytes)}{where}{reason}")
    if len(values) > _SHOWN:
        lines.append(f"    … and {len(values) - _SHOWN} smaller")
    return lines
