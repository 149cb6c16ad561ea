"""The commands: each gets its parsed arguments, and returns its answer as text and as data for JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.analysis.cost.model import tensor_bytes
from roundpipe_fx.api import planning
from roundpipe_fx.budget import bytes_text
from roundpipe_fx.command_line.adapters import add_lora
from roundpipe_fx.command_line.largest_batch import largest_batch
from roundpipe_fx.command_line.model_of import CommandError, Named, named_model
from roundpipe_fx.command_line.quantized_base import quantize
from roundpipe_fx.report.issue_report import issue_report, report_text
from roundpipe_fx.report.plan import Plan
from roundpipe_fx.report.plan_page import page_of_plans


def _planned(asked: argparse.Namespace, named: Named, rows: int, **mesh: Any) -> Plan:
    pipelined = asked.offloaded or asked.devices > 1
    microbatches = asked.num_microbatches or (2 * asked.devices if pipelined else None)
    if mesh.get("optimizer") is not None:
        mesh["optimizer"] = _optimizer(mesh["optimizer"], named)
    return planning.plan(
        named.model,
        memory_budget=asked.memory_budget,
        device=asked.device,
        devices=asked.devices,
        tiling=asked.tiling,
        offloaded=asked.offloaded,
        num_microbatches=None if microbatches is None else min(rows, microbatches),  # each has a row at least
        **mesh,
        **named.make_batch(rows, asked.sequence),
    )


def _optimizer(name: str, named: Named) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, name, None)
    is_one = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if not is_one or kind is torch.optim.Optimizer:
        raise CommandError(f"--optimizer {name}: not a class of torch.optim, such as AdamW")
    made = kind(named.model.parameters())
    assert isinstance(made, torch.optim.Optimizer)
    return made


def _plan_asked(asked: argparse.Namespace) -> Plan:
    """The plan that a command is about: from a file, or made now."""
    if asked.model.endswith(".json"):
        return _read(Path(asked.model))
    return _planned_as_asked(asked)


def _planned_as_asked(asked: argparse.Namespace, **mesh: Any) -> Plan:
    """The plan for the batch that was asked for."""
    if (asked.num_microbatches or 0) > asked.batch:
        raise CommandError(
            f"{asked.batch} rows cannot be split into {asked.num_microbatches} microbatches: give a larger --batch"
        )
    return _planned(asked, _named(asked), asked.batch, **mesh)


def _named(asked: argparse.Namespace) -> Named:
    """The model that was asked for, with its adapters."""
    named = named_model(asked.model, asked.dtype)
    if asked.quantize is not None:
        if asked.lora is None:
            raise CommandError("--quantize freezes the weights: give --lora too, such as --lora r=16")
        if not quantize(named.model, asked.quantize):
            raise CommandError(f"--quantize {asked.quantize}: {asked.model} has no linear layers")
    return named if asked.lora is None else dataclasses.replace(named, model=add_lora(named.model, asked.lora))


def _read(path: Path) -> Plan:
    return Plan.from_json(path.read_text())


def plan(asked: argparse.Namespace) -> tuple[str, Any]:
    """The plan of a step."""
    for path in (asked.output, asked.html):
        if path is not None and not path.parent.is_dir():  # said before planning, which can take minutes
            raise CommandError(f"{path}: there is no folder {path.parent}")
    planned = _planned_as_asked(
        asked,
        mesh_shape=asked.mesh_shape,
        shard=asked.shard,
        schedule=asked.schedule,
        optimizer=asked.optimizer,
    )
    if asked.output is not None:
        asked.output.write_text(planned.to_json())
    return _text_and_plan(asked, planned)


def show(asked: argparse.Namespace) -> tuple[str, Any]:
    """A plan from a file."""
    return _text_and_plan(asked, _read(asked.plan))


def _text_and_plan(asked: argparse.Namespace, plan: Plan) -> tuple[str, Any]:
    if asked.html is not None:
        plan.write_html(asked.html)
    # The JSON takes another search for the frontier's plans, which a large model makes one wait for.
    return plan.details() if asked.details else str(plan), json.loads(plan.to_json()) if asked.json else None


def explain(asked: argparse.Namespace) -> tuple[str, Any]:
    """Explain what happens to a value, or to all values of a module."""
    text = _plan_asked(asked).explain(asked.name)
    return text, text.splitlines()


def frontier(asked: argparse.Namespace) -> tuple[str, Any]:
    """Peak bytes against modelled seconds of recomputation."""
    planned = _plan_asked(asked)
    try:
        points, untiled = planned.frontier(), set(planned.frontier(tiles=False))
    except RuntimeError as error:
        raise CommandError(str(error)) from error
    rows = [
        f"{bytes_text(size):>12}  {seconds * 1e3:12.3f} ms{'' if (size, seconds) in untiled else '  in tiles'}"
        for size, seconds in points
    ]
    return "\n".join([f"        peak  recomputation, modelled with the {planned.rates}", *rows]), points


def fit(asked: argparse.Namespace) -> tuple[str, Any]:
    """The largest batch that fits."""
    if isinstance(asked.memory_budget, float):
        raise CommandError("--memory-budget is a share, which every batch fits: give bytes, such as 6GiB")
    if asked.memory_budget is None and not DEVICES[planning.device_name(asked.device)].memory:
        raise CommandError("the memory of the CPU has no limit here: give --device or --memory-budget, such as 6GiB")
    named = _named(asked)

    def note(rows: int, plan: Plan | None) -> None:
        if sys.stderr.isatty():
            outcome = f"fits, peak {bytes_text(plan.peak_bytes)}" if plan is not None else "does not fit"
            print(f"batch {rows}: {outcome}", file=sys.stderr)

    rows, largest = largest_batch(lambda rows: _planned(asked, named, rows, optimizer=asked.optimizer), note)
    recomputes = f"recomputes {largest.recompute_seconds * 1e3:.3f} of {largest.forward_seconds * 1e3:.3f} modelled ms"
    recomputes += f" with the {largest.rates}"
    unit = "image" if named.images else "row"
    each = "" if named.images else f" of {asked.sequence} tokens"
    count = f"{rows} {unit}{'' if rows == 1 else 's'}{each}"
    text = f"largest batch: {count} (peak {bytes_text(largest.peak_bytes)}, {recomputes})"
    held = tensor_bytes([*named.model.parameters(), *named.model.buffers()])
    if largest.model is not None and largest.model.optimizer_name:
        optimizer = f"{largest.model.optimizer_name}'s state, {bytes_text(largest.model.optimizer)}"
        text += f"\nbeside the peak: parameters and buffers, {bytes_text(held)}; {optimizer}"
    elif not asked.offloaded and asked.devices == 1:
        state = 2 * tensor_bytes([parameter for parameter in named.model.parameters() if parameter.requires_grad])
        text += (
            f"\nbeside the peak: parameters and buffers, {bytes_text(held)}; what an optimizer keeps is not counted "
            f"({bytes_text(state)} for AdamW): give --optimizer"
        )
    return text, {
        "batch": rows,
        "sequence": None if named.images else asked.sequence,
        "parameter_bytes": held,
        "optimizer_bytes": largest.model.optimizer if largest.model is not None else 0,
        "peak_bytes": largest.peak_bytes,
        "recompute_seconds": largest.recompute_seconds,
        "forward_seconds": largest.forward_seconds,
        "rates": largest.rates,
    }


def compare(asked: argparse.Namespace) -> tuple[str, Any]:
    """Two plans side by side."""
    plans = [_read(path) for path in asked.plans]
    figures: list[tuple[str, str, Callable[[Plan], float], Callable[[float], str]]] = [
        ("stages", "stages", lambda plan: len(plan.stages), lambda value: str(int(value))),
        ("peak", "peak_bytes", lambda plan: plan.peak_bytes, lambda value: bytes_text(int(value))),
        ("saved", "saved_bytes", lambda plan: plan.saved_bytes, lambda value: bytes_text(int(value))),
        ("forward, ms", "forward_seconds", lambda plan: plan.forward_seconds, lambda value: f"{value * 1e3:.3f}"),
        (
            "recomputed, ms",
            "recompute_seconds",
            lambda plan: plan.recompute_seconds,
            lambda value: f"{value * 1e3:.3f}",
        ),
    ]
    data: dict[str, list[Any]] = {key: [of(planned) for planned in plans] for _, key, of, _ in figures}
    texts = [f"{name:<16}{show(data[key][0]):>14}{show(data[key][1]):>14}" for name, key, _, show in figures]
    if asked.html is not None:
        asked.html.write_text(
            page_of_plans([plan.to_json() for plan in plans], list(map(str, asked.plans))), encoding="utf-8"
        )
    kept = [{value.name: value for stage in planned.stages for value in stage.saved} for planned in plans]
    data["saved_alone"] = []
    for index, path in enumerate(asked.plans):
        only = [value for name, value in kept[index].items() if name not in kept[1 - index]]
        texts.append(f"saved by {path} alone: {len(only)} values, {bytes_text(sum(v.bytes for v in only))}")
        data["saved_alone"].append([value.name for value in only])
    return "\n".join(texts), data


def report(asked: argparse.Namespace) -> tuple[str, Any]:
    """Report what an issue should tell; nothing private."""
    facts = issue_report(None if asked.plan is None else _read(asked.plan))
    return report_text(facts), facts


def devices(asked: argparse.Namespace) -> tuple[str, Any]:
    """Devices that can be planned for, with their bytes of memory."""
    memory = {name: device.memory for name, device in DEVICES.items()}
    lines = [f"{name:<12}{bytes_text(size) if size else 'no limit':>12}" for name, size in memory.items()]
    return "\n".join(lines), memory
