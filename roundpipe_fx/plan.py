"""The plan: what was decided, as a value that prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import fx

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.codegen import Program, StageModule, program_text, stage_text
from roundpipe_fx.codegen.text import type_text
from roundpipe_fx.joint_graph import JointGraph, Mark, Phase, is_tensor, module_path, saved_values, tensor_values
from roundpipe_fx.planner.choose import Chosen
from roundpipe_fx.segment import Segment, StageCut
from roundpipe_fx.simulator import PeakMoment
from roundpipe_fx.torch_private import module_path_text, size_hint

__all__ = ["Plan", "PlannedStage", "PlannedValue", "bytes_text", "make_plan"]

_SHOWN = 6


@dataclass(frozen=True)
class PlannedValue:
    """One value of the graph.

    Attributes:
        name: the value's name in the emitted code.
        module: path of the user's module that makes it.
        type: dtype and shape.
        bytes: its storage; upper bound where the size depends on data.
        reason: why it was hoisted; empty otherwise.
    """

    name: str
    module: str
    type: str
    bytes: int
    reason: str = ""


@dataclass(frozen=True)
class PlannedStage:
    """One stage and what happens to its values.

    Attributes:
        index: position in the pipeline.
        modules: the user's modules in it, first and last.
        segments: indices of its first and last segment.
        forward_seconds: modelled.
        recompute_seconds: modelled; what the backward repeats or starts before gradients arrive.
        repeated_seconds: modelled; of forward operations that the backward runs again.
        backward_seconds: modelled, without the recomputation.
        entry_bytes: computed values that live across its beginning.
        saved: kept from forward to backward, without the hoisted ones and generator states.
        hoisted: kept because their operation must not run twice.
        recomputed: made again in the backward.
        replayed: seeded operations that run again from a saved generator state.
        same_as: an earlier stage that does the same work on the same shapes, if there is one.
    """

    index: int
    modules: str
    segments: tuple[int, int]
    forward_seconds: float
    recompute_seconds: float
    repeated_seconds: float
    backward_seconds: float
    entry_bytes: int
    saved: tuple[PlannedValue, ...]
    hoisted: tuple[PlannedValue, ...]
    recomputed: tuple[PlannedValue, ...]
    replayed: tuple[PlannedValue, ...]
    same_as: int | None = None


@dataclass(frozen=True)
class Plan:
    """All decisions of one compilation. ``print(plan)`` shows them; :meth:`write` writes the emitted code.

    Attributes:
        stages: the stages in order.
        segments: how many segments the forward was cut into, and how many structurally different ones.
        recompute: the option it was made with.
        budget: bytes that a step may allocate at most at one time; ``None``: no limit.
        peak: when a step allocates most at one time, predicted by simulating the emitted programs.
        trade_off: (peak bytes, modelled seconds of recomputation) of all plans that were considered.
        training: whether there is a backward.
        static: whether all incoming gradients have sizes that are known when compiling.
        outputs: how many values the forward returns to its caller.
        modules: the emitted stage modules.
        programs: the programs that call them: forward, and backward when training.
    """

    stages: tuple[PlannedStage, ...]
    segments: tuple[int, int]
    recompute: str
    budget: int | None
    peak: PeakMoment
    trade_off: tuple[tuple[int, float], ...] = field(repr=False)
    training: bool
    static: bool
    outputs: int
    modules: tuple[StageModule, ...] = field(repr=False)
    programs: tuple[Program, ...] = field(repr=False)

    @property
    def saved_bytes(self) -> int:
        """Bytes of computed values that the forward keeps for the backward, hoisted values and RNG states included."""
        return sum(value.bytes for stage in self.stages for value in (*stage.saved, *stage.hoisted))

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of a step: bytes allocated at most at one time beyond what was allocated when it began.

        The forward's outputs count until the backward is over, since the caller may hold them.
        """
        return self.peak.bytes

    @property
    def recompute_seconds(self) -> float:
        """Modelled seconds of what the backward computes again."""
        return sum(stage.repeated_seconds for stage in self.stages)

    def sources(self) -> dict[str, str]:
        """Every emitted module and program as readable Python, by file name.

        A module that does the same work on the same shapes as an earlier one says so instead of repeating it.
        """
        texts: dict[str, str] = {}
        first: dict[str, str] = {}
        for module in self.modules:
            name = f"stage_{module.stage}.{module.phase}.py"
            same = first.setdefault(module.fingerprint, name)
            texts[name] = stage_text(module) if same == name else f"# the same work on the same shapes as {same}\n"
        programs = [program_text(program, self._describe) for program in self.programs]
        texts["program.py"] = "import torch\n\n\n" + "\n\n".join(programs)
        return texts

    def write(self, folder: str | Path) -> list[Path]:
        """Write every emitted module and program into ``folder`` (made if missing). Returns the files."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        written = []
        for name, text in self.sources().items():
            path = target / name
            path.write_text(text)
            written.append(path)
        return written

    def _describe(self, module: StageModule) -> str:
        return f"stage {module.stage} {module.phase}: {self.stages[module.stage].modules}"

    def __str__(self) -> str:
        kind = f"recompute={self.recompute!r}, training" if self.training else "inference"
        total, different = self.segments
        lines = [
            f"roundpipe_fx plan: {len(self.stages)} stages of {total} segments ({different} different), {kind}",
            f"saved for the backward: {bytes_text(self.saved_bytes)}",
        ]
        for stage in self.stages:
            same = f"  (same as stage {stage.same_as})" if stage.same_as is not None else ""
            lines.append(f"stage {stage.index}: {stage.modules}{same}")
            seconds = f"  modelled ms: forward {stage.forward_seconds * 1e3:.3f}"
            if self.training:
                seconds += (
                    f", recompute {stage.recompute_seconds * 1e3:.3f}, backward {stage.backward_seconds * 1e3:.3f}"
                )
            lines.append(f"{seconds}; enters {bytes_text(stage.entry_bytes)}")
            for title in ("saved", "hoisted", "recomputed", "replayed"):
                lines += _listing(title, getattr(stage, title))
        return "\n".join(lines)


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


def make_plan(
    joint: JointGraph,
    segments: Sequence[Segment],
    cuts: Sequence[StageCut],
    modules: Mapping[tuple[int, Phase], StageModule],
    forward: Program,
    backward: Program | None,
    recompute: str,
    peak: PeakMoment,
    chosen: Chosen | None = None,
) -> Plan:
    """Read the plan off a finished graph."""
    saved = [node for node in saved_values(joint) if node.op != "placeholder"] if backward is not None else []
    by_stage: dict[int, list[fx.Node]] = {cut.index: [] for cut in cuts}
    for node in joint.computed():
        by_stage[node.meta[Mark.STAGE]].append(node)
    stages = []
    first: dict[tuple[str, ...], int] = {}
    for cut in cuts:
        nodes = by_stage[cut.index]
        own_saved = [node for node in saved if node.meta[Mark.STAGE] == cut.index]
        again = [node for node in nodes if Mark.ORIGIN in node.meta and is_tensor(node)]
        seconds = {
            phase: sum(node.meta[Mark.SECONDS] for node in nodes if node.meta[Mark.PHASE] is phase) for phase in Phase
        }
        digests = tuple(modules[cut.index, phase].fingerprint for phase in Phase if (cut.index, phase) in modules)
        same = first.setdefault(digests, cut.index)
        stages.append(
            PlannedStage(
                cut.index,
                _modules_text(nodes),
                (cut.first, cut.last),
                seconds[Phase.FORWARD],
                seconds[Phase.RECOMPUTE],
                sum(node.meta[Mark.SECONDS] for node in nodes if Mark.ORIGIN in node.meta),
                seconds[Phase.BACKWARD],
                segments[cut.first].entry_bytes,
                saved=_values(node for node in own_saved if not _hoist_reason(node)),
                hoisted=_values(node for node in own_saved if _hoist_reason(node)),
                recomputed=_values(node for node in again if node.meta.get(Mark.BYTES) or Mark.REPLAYED in node.meta),
                replayed=_values(node for node in nodes if Mark.REPLAYED in node.meta and Mark.ORIGIN in node.meta),
                same_as=None if same == cut.index else same,
            )
        )
    different = len({segment.fingerprint for segment in segments})
    programs = (forward,) if backward is None else (forward, backward)
    tangents = [value for node in joint.tangents for value in tensor_values(node)]
    return Plan(
        tuple(stages),
        (len(segments), different),
        recompute,
        chosen.limit if chosen is not None else None,
        peak,
        chosen.frontier if chosen is not None else (),
        training=backward is not None,
        static=all(isinstance(size, int) for value in tangents for size in value.shape),
        outputs=joint.num_forward_outputs,
        modules=tuple(modules.values()),
        programs=programs,
    )


def _values(nodes: Iterable[fx.Node]) -> tuple[PlannedValue, ...]:
    return tuple(
        PlannedValue(
            node.name,
            module_path(node, module_path_text),
            type_text(node.meta.get("val")),
            _bytes(node),
            _hoist_reason(node),
        )
        for node in nodes
    )


def _bytes(node: fx.Node) -> int:
    """Bytes of the storages that the node's value keeps alive."""
    found = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in tensor_values(node)}
    return sum(size_hint(size) for size in found.values())


def _hoist_reason(node: fx.Node) -> str:
    if Mark.HOISTED in node.meta:
        return str(node.meta[Mark.HOISTED])
    for source in node.all_input_nodes:
        if Mark.HOISTED in source.meta and isinstance(source.meta.get("val"), (tuple, list)):
            return str(source.meta[Mark.HOISTED])
    return ""


def _modules_text(nodes: Sequence[fx.Node]) -> str:
    paths = [module_path(node, module_path_text) for node in nodes if node.meta[Mark.PHASE] is Phase.FORWARD]
    paths = [path for path in paths if path] or [""]
    if paths[0] == paths[-1]:
        return paths[0] or "model"
    return f"{paths[0]} … {paths[-1]}"
