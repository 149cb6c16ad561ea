"""The text of a plan: its header, its stages, and what ``plan.explain(…)`` says of a value."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.ir.decisions import (
    CPU_RATES,
    LISTS,
    Decisions,
    ModelMemory,
    PeakMoment,
    PlannedPipeline,
    PlannedStage,
    PlannedTiles,
    PlannedValue,
    tiles_text,
)

_SHOWN = 6
"""Number of values or devices that are listed."""

_REDUCTIONS = {
    "mean": "the loss is the mean of the microbatches' losses, weighed by their rows",
    "sum": "the loss is the sum of the microbatches' losses",
}


def header_lines(plan: Decisions, corrected: float | None = None) -> list[str]:
    """The plan as a whole: stages, budget, peak, saved and recomputed values, sizes. At most thirteen lines.

    Args:
        corrected: seconds of a step, where stages were measured.
    """
    kind = "inference"
    if plan.training:
        # Within a budget the plan decides what is recomputed, and `recompute` says nothing.
        kind = f"recompute={plan.recompute!r}, training" if plan.budget is None else "training within a budget"
    total, different = plan.segments
    cut = f"{_count_text(len(plan.stages), 'stage')} of {_count_text(total, 'segment')} ({different} different)"
    lines = [f"roundpipe_fx plan: {cut}, {kind}"]
    if plan.budget is not None:
        lines.append(f"budget: {bytes_text(plan.budget)} ({plan.budget} bytes)")
    if plan.gathered_bytes:
        lines.append(f"beside it, to gather parameters (FSDP2): up to {bytes_text(plan.gathered_bytes)}")
    if plan.bucket_bytes:
        lines.append(f"allocated outside of steps, buckets of DistributedDataParallel: {bytes_text(plan.bucket_bytes)}")
    if plan.pipeline is not None:
        lines += pipeline_lines(plan.pipeline, corrected)
    measure = "predicted peak" if plan.pipeline is None else "of one microbatch alone, predicted peak"
    libraries = f"; libraries keep {bytes_text(plan.library_bytes)} beside it" if plan.library_bytes else ""
    lines.append(
        f"{measure}: {bytes_text(plan.peak.bytes)} ({plan.peak.bytes} bytes), {moment_text(plan.peak)}{libraries}"
    )
    if plan.model is not None:
        lines.append(_memory_of_device(plan, plan.model))
    if plan.training:
        lines.append(
            f"saved for the backward: {bytes_text(plan.saved_bytes)}{_on_host(plan)}; recomputed: "
            f"{plan.recompute_seconds * 1e3:.3f} ms modelled (forward {plan.forward_seconds * 1e3:.3f} ms)"
        )
    if plan.assumed_host_bytes and plan.host_bytes:
        lines.append(
            f"assumed: a host with {bytes_text(plan.assumed_host_bytes)} of memory; host_budget= names another"
        )
    if plan.is_bound_by_host_link:
        lines.append(
            f"the link to the host is the bottleneck: the device waits for it {plan.host_wait:.0%} of the step, and it "
            f"carries values to the host during {plan.host_link_share:.0%} of the forward"
        )
    # Rates of the CPU's table are those of every plan on a CPU, and go without saying.
    if plan.rates not in ("", CPU_RATES):
        lines.append(f"seconds are modelled with the {plan.rates}")
    if plan.tiles:
        lines.append(f"carried out in tiles, so sums round differently: {tiles_text(plan.tiles)}")
    if plan.dropped_bytes:
        unread = f", {bytes_text(plan.unread_bytes)} of them unread" if plan.unread_bytes else ""
        lines.append(
            f"assumed: the caller drops {bytes_text(plan.dropped_bytes)} of outputs before the backward begins{unread}"
        )
    if plan.sizes:
        lines.append(f"made for sizes up to: {_bounds(plan.sizes)}")
    if plan.assumed:
        lines.append(f"depends on data, as seen plus headroom: {_bounds(plan.assumed)}")
    return lines


def _memory_of_device(plan: Decisions, model: ModelMemory) -> str:
    """All that a device holds at the peak, by what people call it."""
    # The largest parts of what the device holds; what no part names are temporaries and outputs.
    gradients = sum(value.bytes for value in plan.peak.live if value.gradient)
    saved = sum(value.bytes for value in plan.peak.live if value.saved and not value.gradient)
    parts = {"parameters": model.parameters, f"{model.optimizer_name}'s state": model.optimizer}
    parts |= {"gradients": gradients, "saved values": saved}
    # What remains of the peak, so that the parts add up.
    parts["temporaries and outputs"] = plan.peak.bytes - gradients - saved
    total = model.parameters + model.optimizer + plan.peak.bytes
    limit = f" of {bytes_text(model.device)}" if model.device else ""
    held = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items() if size)
    unknown = "" if model.optimizer_name else ", without an optimizer's state"
    return f"with the model {bytes_text(total)}{limit}{unknown}: {held}"


def _on_host(plan: Decisions) -> str:
    return f", and on the host {bytes_text(plan.host_bytes)}" if plan.on_host else ""


def moment_text(peak: PeakMoment) -> str:
    """The operation at which a peak is reached, with its module and line."""
    if not peak.call:
        return "at the beginning"
    module = f" of {peak.module}" if peak.module else ""
    line = f" ({peak.line})" if peak.line else ""
    at = f" at {peak.value}" if peak.value else ""
    return f"in {peak.call}{at}{module}{line}"


def _count_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _bounds(sizes: Mapping[str, int]) -> str:
    shown = ", ".join(f"{name} ≤ {size}" for name, size in list(sizes.items())[:_SHOWN])
    return shown if len(sizes) <= _SHOWN else f"{shown}, … {len(sizes) - _SHOWN} more"


def stage_lines(stage: PlannedStage, training: bool, offloaded: Collection[str] = ()) -> list[str]:
    """A stage: its modelled milliseconds, and its largest values by list.

    Args:
        training: whether there is a backward.
        offloaded: names of values that leave for the host.
    """
    lines = []
    same = f"  (same as stage {stage.same_as})" if stage.same_as is not None else ""
    lines.append(f"stage {stage.index}: {stage.modules}{same}")
    seconds = f"  modelled ms: forward {stage.forward_seconds * 1e3:.3f}"
    if training:
        seconds += f", recompute {stage.recompute_seconds * 1e3:.3f}, backward {stage.backward_seconds * 1e3:.3f}"
    if stage.early_seconds:
        seconds += f", of which before its gradients arrive {stage.early_seconds * 1e3:.3f}"
    lines.append(f"{seconds}; enters {bytes_text(stage.entry_bytes)}")
    for title in ("saved", "hoisted", "recomputed", "replayed"):
        lines += _listing(title, getattr(stage, title), offloaded)
    return lines


def pipeline_lines(pipeline: PlannedPipeline, corrected: float | None = None) -> list[str]:
    """Describe the pipeline of a step, and its costs.

    Args:
        corrected: seconds of a step, where stages were measured.
    """
    measured = "" if corrected is None else f" ({corrected * 1e3:.3f} ms with the stages' seconds in the latest step)"
    checkpoint = f", checkpoint={pipeline.checkpoint!r}" if pipeline.checkpoint else ""
    return [
        f"pipelined: {pipeline.microbatches} microbatch{'' if pipeline.microbatches == 1 else 'es'} by schedule "
        f"{pipeline.schedule!r} on {_count_text(len(pipeline.devices), 'device')}{checkpoint}; "
        f"{_REDUCTIONS[pipeline.loss_reduction]}",
        f"a step: {pipeline.makespan * 1e3:.3f} ms modelled{measured}, bubble {pipeline.bubble:.1%}; predicted peaks "
        f"of the devices: {_peaks_text(pipeline.peak_bytes)}",
        *_host_lines(pipeline),
        *_gather_lines(pipeline),
        *_mesh_lines(pipeline),
    ]


def _mesh_lines(pipeline: PlannedPipeline) -> list[str]:
    """Replicas, bytes of a device, and what communication costs."""
    mesh = pipeline.mesh
    if mesh is None:
        return []
    # The fullest device is the one that decides whether the mesh fits.
    largest = max(range(len(pipeline.devices)), key=pipeline.device_bytes.__getitem__)
    parts = [f"weights {bytes_text(mesh.weight_bytes[largest])}", f"a step {bytes_text(pipeline.peak_bytes[largest])}"]
    if any(mesh.optimizer_bytes):
        parts.insert(1, f"optimizer {bytes_text(mesh.optimizer_bytes[largest])}")
    total = mesh.replicas * len(pipeline.devices) * mesh.tensor_parallel
    share = " with sharded parameters" if mesh.sharded else ""
    groups = f", groups of {mesh.tensor_parallel} devices for tensor parallelism" if mesh.tensor_parallel > 1 else ""
    speed = pipeline.tokens_per_second
    within = ""
    if mesh.tensor_parallel > 1:
        within = (
            f"; tensor parallelism communicates for {mesh.tensor_parallel_seconds * 1e3:.3f} ms "
            f"({mesh.tensor_parallel_seconds / pipeline.makespan:.1%}), beside which nothing runs"
        )
    return [
        f"mesh: {_count_text(mesh.replicas, 'replica')}{share}{groups}, {total} devices in all; the fullest has "
        f"{bytes_text(pipeline.device_bytes[largest])} ({', '.join(parts)})",
        f"communication between replicas: {mesh.collective_seconds * 1e3:.3f} ms on the busiest device; without any "
        f"communication a step would be {mesh.unhidden_seconds * 1e3:.3f} ms "
        f"({mesh.unhidden_seconds / pipeline.makespan:.1%}) shorter"
        + within
        + (f"; {speed:,.0f} tokens/s per device" if speed is not None else ""),
    ]


def _gather_lines(pipeline: PlannedPipeline) -> list[str]:
    """Describe what devices gather of sharded parameters, and what of it stays."""
    if not pipeline.gathered_bytes:
        return []
    stages = [stage for stage in pipeline.gathered if stage.gaps]
    kept = sorted((stage for stage in stages if stage.kept), key=lambda stage: stage.stage)
    texts = [
        f"stage {stage.stage}" + ("" if stage.kept == stage.gaps else f" ({stage.kept} of {stage.gaps} times)")
        for stage in kept[:_SHOWN]
    ]
    if len(kept) > _SHOWN:
        texts.append(f"… {len(kept) - _SHOWN} more")
    stay = f"; parameters that stay gathered: {', '.join(texts) or 'none'}" if stages else ""
    return [f"sharded: a step gathers {_peaks_text(pipeline.gathered_bytes)} of parameters on the devices{stay}"]


def _host_lines(pipeline: PlannedPipeline) -> list[str]:
    """Describe what a step copies to the host and from it, and the memory that it needs there."""
    values = f"{_count_text(pipeline.sent_values, 'value')} ({bytes_text(pipeline.sent_bytes)}) to the host and back"
    if not pipeline.host_to_device_bytes:
        pinned = f"a step copies {values}; pinned on the host: {bytes_text(pipeline.host_value_bytes)}"
        return [pinned] if pipeline.sent_values else []
    parts = [f"weights {bytes_text(pipeline.host_weight_bytes)}"]
    if pipeline.host_gradient_bytes:
        parts.append(f"gradients {bytes_text(pipeline.host_gradient_bytes)}")
    offloaded = ""
    if pipeline.sent_values:
        parts.append(f"values from the devices {bytes_text(pipeline.host_value_bytes)}")
        offloaded = f", and {values}"
    optimizer = ""
    if pipeline.host_optimizer_bytes:
        optimizer = f"; optimizer {bytes_text(pipeline.host_optimizer_bytes)}"
    return [
        f"the model is on the host: a step copies {bytes_text(pipeline.host_to_device_bytes)} of it to the devices"
        f"{offloaded}; "
        f"pinned on the host: {bytes_text(pipeline.host_bytes - pipeline.host_optimizer_bytes)} "
        f"({', '.join(parts)}){optimizer}",
    ]


def _peaks_text(peaks: Sequence[int]) -> str:
    """Peaks of devices in order, neighbours that are equal as one; the largest is always among them."""
    # Equal neighbours are one entry: 8 × 1.2 GiB.
    runs = [(size, len(list(same))) for size, same in itertools.groupby(peaks)]
    texts = [f"{count} × {bytes_text(size)}" if count > 1 else bytes_text(size) for size, count in runs[:_SHOWN]]
    shown = ", ".join(texts)
    if len(runs) <= _SHOWN:
        return shown
    unlisted = sum(count for _, count in runs[_SHOWN:])
    return f"{shown}, … {unlisted} more; {bytes_text(max(peaks))} at most"


def _listing(title: str, values: Sequence[PlannedValue], offloaded: Collection[str]) -> list[str]:
    if not values:
        return []
    lines = [f"  {title}: {len(values)} values, {bytes_text(sum(value.bytes for value in values))}"]
    # The largest first: these are what a user can do something about.
    for value in sorted(values, key=lambda value: -value.bytes)[:_SHOWN]:
        where = f" in {value.module}" if value.module else ""
        reason = f" — {value.reason}" if value.reason else ""
        leaves = "; offloaded" if value.name in offloaded else ""
        lines.append(f"    {value.name} {value.type} {bytes_text(value.bytes)}{where}{reason}{leaves}")
    if len(values) > _SHOWN:
        lines.append(f"    … and {len(values) - _SHOWN} smaller")
    return lines


def explain_value(stage: int, fate: str, value: PlannedValue) -> str:
    """Explain what happens to a value, and what the alternative would cost.

    Args:
        stage: index of its stage.
        fate: name of the list of its stage that it is in.
    """
    seconds = f"{value.recompute_seconds * 1e3:.3f} ms"
    size = bytes_text(value.bytes)
    text = {
        "saved": f"saved from forward to backward, {size}; recomputing it instead would take {seconds}",
        "hoisted": f"saved from forward to backward, {size}, and never recomputed: {value.reason}",
        "recomputed": (
            f"recomputed in the backward {_times(value.times)}, in {seconds}; saving it instead would hold {size}"
            f"{', but it must not be saved: ' if value.reason else ''}{value.reason}"
        ),
        "replayed": (
            f"replayed in the backward {_times(value.times)} from its saved generator state, in {seconds}; saving it "
            f"instead would hold {size}"
        ),
        "passing": f"needed only by the forward, {size} while it is alive",
    }[fate]
    where = f" in {value.module}" if value.module else ""
    return f"{value.name} {value.type}{where} (stage {stage}): {text}"


def explain_tiles(tiles: PlannedTiles) -> str:
    """Explain what is carried out in tiles, and what it would take as a whole."""
    where = f" in {tiles.module}" if tiles.module else ""
    return (
        f"{tiles.name} {tiles.type}{where}: computed in {tiles.tiles} tiles of its {tiles.rows} rows, one after "
        f"another, in {tiles.seconds * 1e3:.3f} ms with the operations around it; as a whole it would hold "
        f"{bytes_text(tiles.bytes)}"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def explained(plan: Decisions, name: str) -> str:
    """The explanation, a line for each value.

    Args:
        name: name of a value in the emitted code, or of a module.

    Raises:
        ValueError: there is no such value or module; the message lists close matches.
    # No value has the name: it is that of a module, and all values of its submodules are explained.
    """
    fates = list(_fates(plan))
    matching = [fate for fate in fates if fate[2].name == name]
    tiled = [tiles for tiles in plan.tiles if tiles.name == name]
    if not matching and not tiled:
        matching = [fate for fate in fates if fate[2].module == name or fate[2].module.startswith(f"{name}.")]
        tiled = [loop for loop in plan.tiles if loop.module == name or loop.module.startswith(f"{name}.")]
    if not matching and not tiled:
        values: list[PlannedValue | PlannedTiles] = [*(fate[2] for fate in fates), *plan.tiles]
        names = {value.name for value in values} | {value.module for value in values}
        close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4)
        hint = f" Did you mean {', '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"no value and no module named {name!r} in this plan.{hint}")
    texts = [explain_value(stage, fate, value) + _offloaded(plan, value.name) for stage, fate, value in matching]
    return "\n".join([*texts, *map(explain_tiles, tiled)])


def _offloaded(plan: Decisions, name: str) -> str:
    """The part of a value's explanation that says when it leaves its device."""
    if name in plan.on_host:
        return "; on the host from the forward to the backward"
    for value in plan.pipeline.offloaded if plan.pipeline is not None else ():
        if value.name == name:
            count = plan.pipeline.microbatches if plan.pipeline is not None else 0
            return f"; offloaded: it leaves for the host and comes back in {value.microbatches} of {count} microbatches"
    return ""


def _fates(plan: Decisions) -> Iterator[tuple[int, str, PlannedValue]]:
    for stage in plan.stages:
        replayed = {value.name for value in stage.replayed}
        for fate in LISTS:
            # A replayed value is listed among the recomputed ones as well; it is told once, as replayed.
            for value in getattr(stage, fate):
                if fate == "replayed" or value.name not in replayed:
                    yield stage.index, fate, value
