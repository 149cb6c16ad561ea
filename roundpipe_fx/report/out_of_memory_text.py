"""The message of an out-of-memory error: what was planned, what is allocated and by whom, and what to change."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roundpipe_fx.budget import bytes_text
from roundpipe_fx.ir.decisions import Decisions
from roundpipe_fx.report.plan_text import moment_text
from roundpipe_fx.runtime.step_memory import DeviceMemory

_ORIGINAL = "\n\nPyTorch's error: "
"""Between what is said here and the original text."""
_MOST_DEVICES = 4
"""Of a pipeline, devices that are listed: those with the least free memory."""
_MIB = 1 << 20
_OF_AVAILABLE = 0.95
"""The fraction of the memory available to a step that is proposed as its budget."""
_OF_BUDGET = 0.8
"""The fraction of a budget that is proposed where the device should have had enough memory for it."""


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Figures of a plan in the message of an out-of-memory error.

    Attributes:
        budget: in bytes; ``None``: there is none.
        fraction: of the user's budget, which is smaller after running out of memory before.
        peak_bytes: predicted peak in bytes, beyond what was allocated when the step began.
        lowest_bytes: the lowest peak of the plans that were considered; ``None``: no other was.
        is_tiled: whether operations are carried out in tiles.
    """

    budget: int | None
    fraction: float
    peak_bytes: int
    moment: str
    lowest_bytes: int | None
    is_tiled: bool


def planned_memory(plan: Decisions, fraction: float = 1.0) -> PlannedMemory:
    """Select the figures of a plan for a message, so that the rest is not kept.

    Args:
        fraction: of the user's budget that the plan may use.
    """
    moment = moment_text(plan.peak)
    if plan.pipeline is not None:
        moment = f"on the device that needs most; that of one microbatch alone {moment}"
    return PlannedMemory(
        budget=plan.budget,
        fraction=fraction,
        peak_bytes=plan.peak_bytes,
        moment=moment,
        # One alone is what was enough, and nothing below it was looked at.
        lowest_bytes=min(size for size, _ in plan.trade_off) if len(plan.trade_off) > 1 else None,
        is_tiled=bool(plan.tiles),
    )


def out_of_memory_text(original: str, phase: str, planned: PlannedMemory, devices: Sequence[DeviceMemory]) -> str:
    """Compose the message of an out-of-memory error.

    Args:
        original: the text of PyTorch's error.
        phase: what ran: ``"forward"``, ``"backward"`` or ``"step"``.
        devices: memory of the devices; none where memory is not counted, on the CPU.
    """
    title = f"out of memory in the {phase} of a model compiled by roundpipe_fx."
    advice = [f"  - {line}" for line in _advice(planned, devices)]
    lines = [title, *_plan_lines(planned), *_device_lines(devices), "To change one of these:", *advice]
    return "\n".join(lines) + _ORIGINAL + original


def is_explained(text: str) -> bool:
    """Test for a message that :func:`out_of_memory_text` has composed."""
    return _ORIGINAL in text


def original_text(text: str) -> str:
    """PyTorch's part of a message."""
    return text.rpartition(_ORIGINAL)[2]


def _plan_lines(planned: PlannedMemory) -> Iterator[str]:
    if planned.budget is None:
        yield "  budget: none"
    else:
        smaller = f", {planned.fraction:.0%} of what was asked for" if planned.fraction < 1 else ""
        yield f"  budget: {bytes_text(planned.budget)} ({planned.budget} bytes){smaller}"
    yield f"  plan: predicted peak {bytes_text(planned.peak_bytes)}, {planned.moment}"


def _device_lines(devices: Sequence[DeviceMemory]) -> Iterator[str]:
    listed = sorted(devices, key=lambda memory: memory.free)[:_MOST_DEVICES]
    for memory in sorted(listed, key=lambda memory: memory.device):
        name = memory.device
        yield f"  {name}: allocated by the step so far {bytes_text(memory.of_step)}"
        parts = {
            "parameters and buffers": memory.parameters,
            "gradients": memory.gradients,
            "optimizer state": memory.optimizer,
            "kept by libraries": memory.libraries,
            "others": memory.others,
        }
        categories = ", ".join(f"{part} {bytes_text(size)}" for part, size in parts.items() if size)
        yield f"  {name}: allocated before it {bytes_text(memory.before)}" + (f": {categories}" if categories else "")
        unused = memory.reserved - memory.allocated
        yield f"  {name}: reserved but not allocated {bytes_text(unused)}, in pieces between what is allocated"
        elsewhere = memory.total - memory.free - memory.reserved
        outside = f", taken outside of PyTorch or by other processes {bytes_text(elsewhere)}" if elsewhere > 0 else ""
        yield f"  {name}: free {bytes_text(memory.free)} of {bytes_text(memory.total)}{outside}"
    if len(devices) > len(listed):
        yield f"  … {len(devices) - len(listed)} more devices, with more free memory"


def _advice(planned: PlannedMemory, devices: Sequence[DeviceMemory]) -> Iterator[str]:
    scarce = min(devices, key=lambda memory: memory.available, default=None)
    proposed = int(_OF_BUDGET * planned.budget) if planned.budget is not None else None
    why = "which is less than was planned for"
    if scarce is not None and scarce.available < planned.peak_bytes:
        proposed = int(_OF_AVAILABLE * min(scarce.available, planned.budget or scarce.available))
        why = f"since beside what else is allocated {bytes_text(scarce.available)} are left for the step"
    elif scarce is not None:
        if not _splits_all():
            yield (
                f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment: {bytes_text(scarce.available)} "
                "were left for the step, which is enough, but not in one piece"
            )
        why = "which leaves more for what lies between allocated blocks"
    if proposed:
        beneath = ""
        if planned.lowest_bytes is not None and proposed < planned.lowest_bytes and not planned.is_tiled:
            beneath = f"; below {bytes_text(planned.lowest_bytes)} it takes tiles, which tiling='never' would forbid"
        yield f"memory_budget={_budget_text(proposed)}, {why}{beneath}"
    if not planned.is_tiled:
        yield "tiling='auto', which computes wide values, such as logits, in tiles wherever that pays, beside a budget"
    if any(memory.gradients for memory in devices):
        yield "optimizer.zero_grad() before the step, unless gradients are accumulated over several"
    if any(memory.others for memory in devices):
        yield "free what others hold: outputs and losses of earlier steps that are kept, other models"
    yield (
        "see what is planned when: model.plan.write_snapshot('step.pickle'), behind torch.compile "
        "roundpipe_fx.plans(model)[-1].write_snapshot('step.pickle'), opens in https://pytorch.org/memory_viz, after "
        "torch.cuda.memory._record_memory_history() with what was allocated beside it"
    )


def _splits_all() -> bool:
    settings = ",".join(os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def _budget_text(size: int) -> str:
    return f"'{size // _MIB}MiB'" if size >= 64 * _MIB else str(size)
