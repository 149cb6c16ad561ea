"""Issue reports: versions, devices, settings and the figures of a plan, for who is to find a fault; nothing private.

Names of modules, files, values and of the machine are left out. A plan's fingerprint tells whether two are the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterable
from typing import Any

import torch

from roundpipe_fx.report.plan import Plan

_PACKAGES = ("roundpipe_fx", "torch", "triton", "transformers", "accelerate", "peft", "trl", "lightning", "torchao")
_SWITCHES = (
    "ROUNDPIPE_FX_PLAN_CACHE",
    "ROUNDPIPE_FX_VERIFY",
    "ROUNDPIPE_FX_DISABLE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUDA_LAUNCH_BLOCKING",
)
"""Environment variables that are told with their values; none is a path."""


def issue_report(plan: Plan | None = None) -> dict[str, Any]:
    """The facts of a report, by heading.

    Args:
        plan: whose figures are told; ``None``: no plan's.
    """
    report: dict[str, Any] = {"versions": _versions(), "machine": _machine(), "settings": _settings()}
    if plan is not None:
        report |= {"options": dict(plan.options), "plan": _figures(plan)}
    return report


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
    return versions


def _machine() -> dict[str, Any]:
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_available() else range(0)
    devices = [torch.cuda.get_device_properties(number) for number in cuda]
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads of PyTorch": torch.get_num_threads(),
        "devices": [f"{device.name}, {device.total_memory} bytes" for device in devices],
    }


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in _SWITCHES if name in os.environ}


def _figures(plan: Plan) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "fingerprint": hashlib.sha256(plan.to_json().encode()).hexdigest()[:16],
        "training": plan.training,
        "stages": len(plan.stages),
        "segments, different ones": plan.segments,
        "recompute": plan.recompute,
        "budget bytes": plan.budget,
        "peak bytes": plan.peak_bytes,
        "peak in": plan.peak.call,
        "saved bytes": plan.saved_bytes,
        "host bytes": plan.host_bytes,
        "dropped bytes": plan.dropped_bytes,
        "modelled seconds, forward": plan.forward_seconds,
        "modelled seconds, recomputed": plan.recompute_seconds,
        "rates": plan.rates,
        "tiles": [(tiles.type, tiles.tiles) for tiles in plan.tiles],
        "sizes assumed": sorted(plan.assumed.values()),
    }
    pipeline = plan.pipeline
    if pipeline is not None:
        figures |= {
            "schedule": pipeline.schedule,
            "devices": len(pipeline.devices),
            "microbatches": pipeline.microbatches,
            "makespan": pipeline.makespan,
            "peak bytes of devices": pipeline.peak_bytes,
            "sent bytes": pipeline.sent_bytes,
        }
    return figures


def report_text(report: dict[str, Any]) -> str:
    """A report as Markdown, to be pasted into an issue."""
    return "\n".join(_lines(report))


def _lines(report: dict[str, Any]) -> Iterable[str]:
    for heading, facts in report.items():
        yield f"**{heading}**"
        yield ""
        yield from (f"- {name}: {value}" for name, value in facts.items())
        yield ""
