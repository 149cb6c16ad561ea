"""Plans as JSON: all but the emitted code."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from roundpipe_fx.ir.decisions import (
    LISTS,
    Decisions,
    GatheredStage,
    LiveValue,
    ModelMemory,
    OffloadedValue,
    PeakMoment,
    PlannedDivision,
    PlannedMesh,
    PlannedPipeline,
    PlannedStage,
    PlannedTiles,
    PlannedValue,
)
from roundpipe_fx.report.plan_details import PlanDetails, details_as_data, details_from_data

_FORMAT = "roundpipe_fx plan 12"


def json_of_plan(plan: Decisions, plan_details: PlanDetails) -> str:
    """A plan as JSON. What can be long has a line for itself, without spaces."""
    fields = {item.name: getattr(plan, item.name) for item in dataclasses.fields(Decisions)}
    fields["pipeline"] = dataclasses.asdict(plan.pipeline) if plan.pipeline is not None else None
    fields["stages"] = [dataclasses.asdict(stage) for stage in plan.stages]
    fields["peak"] = dataclasses.asdict(plan.peak)
    fields["model"] = dataclasses.asdict(plan.model) if plan.model is not None else None
    fields["on_host"] = [*plan.on_host]
    fields["tiles"] = [dataclasses.asdict(tiles) for tiles in plan.tiles]
    text = json.dumps({"format": _FORMAT, **fields}, indent=1, default=dict)
    details = details_as_data(plan_details).items()
    lines = (f' "{name}": {json.dumps(value, separators=(",", ":"))}' for name, value in details)
    return ",\n".join([text.removesuffix("\n}"), *lines]) + "\n}"


def fields_of_json(text: str) -> dict[str, Any]:
    """The fields of the plan that :func:`json_of_plan` wrote, by name.

    Raises:
        KeyError: it is not a plan.
        TypeError: it is not a plan.
        ValueError: it is not a plan, or one of another format.
    """
    fields = json.loads(text)
    stored_format = fields.pop("format", None) if isinstance(fields, dict) else None
    if stored_format != _FORMAT:
        raise ValueError(f"format {stored_format!r} is not {_FORMAT!r}")
    live = tuple(LiveValue(**value) for value in fields["peak"].pop("live"))
    fields["peak"] = PeakMoment(**fields["peak"], live=live)
    fields["stages"] = tuple(_stage(stage) for stage in fields["stages"])
    fields["model"] = ModelMemory(**fields["model"]) if fields.get("model") is not None else None
    fields["segments"] = tuple(fields["segments"])
    fields["on_host"] = tuple(fields.get("on_host", ()))
    fields["tiles"] = tuple(PlannedTiles(**tiles) for tiles in fields.get("tiles", ()))
    if fields["pipeline"] is not None:
        lists = {name: tuple(fields["pipeline"][name]) for name in ("devices", "peak_bytes")}
        offloaded = tuple(OffloadedValue(**value) for value in fields["pipeline"]["offloaded"])
        gathered = tuple(GatheredStage(**stage) for stage in fields["pipeline"].get("gathered", ()))
        lists["gathered_bytes"] = tuple(fields["pipeline"].get("gathered_bytes", ()))
        mesh = fields["pipeline"].get("mesh")
        if mesh is not None:
            mesh |= {name: tuple(mesh[name]) for name in ("weight_bytes", "optimizer_bytes")}
            mesh |= {"divisions": tuple(PlannedDivision(**division) for division in mesh.get("divisions", ()))}
            mesh = PlannedMesh(**mesh)
        lists |= {"offloaded": offloaded, "gathered": gathered, "mesh": mesh}
        fields["pipeline"] = PlannedPipeline(**(fields["pipeline"] | lists))
    fields["trade_off"] = tuple((int(size), float(seconds)) for size, seconds in fields["trade_off"])
    details = {
        name: fields.pop(name) for name in ("memory", "lines", "frontier", "alternatives", "timeline", "strings")
    }
    return {**fields, "stored": details_from_data(details), "modules": (), "programs": ()}


def _stage(fields: dict[str, Any]) -> PlannedStage:
    lists = {name: tuple(PlannedValue(**value) for value in fields[name]) for name in LISTS}
    return PlannedStage(**(fields | lists | {"segments": tuple(fields["segments"])}))
