"""Tables of the documentation's page, from the results of runs on GPUs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu import budgets, by_stage, forks, longest, on_host, peers, syncs
from benchmarks.gpu.measurement import Row
from benchmarks.gpu.results import Run, latest, read_runs
from benchmarks.markdown import table

_TEXTS = {
    peers.PART: (
        "Side by side on a GPU",
        "A Llama with a large vocabulary and a GPT-2 with dropout, in bfloat16, forward and backward. A peak is the "
        "allocator's, minus what was allocated before the step. Our budget is the peer's peak. The seconds of a first "
        "step are measured without compiled code on disk, while other processes compile.",
    ),
    on_host.PART: (
        "A model on the host, on a GPU",
        "A model of Qwen3-1.7B's shape, written as `nn.Sequential`, whose parameters are on the host, compared with "
        "RoundPipe. The optimizer is AdamW on float32 copies of the parameters; *stale* means that a step reads the "
        "parameters of the step before.",
    ),
    budgets.PART: (
        "Budgets on a GPU",
        "Bytes that the allocator counts in a step, compared with the planned bytes and with the budget. `least` is "
        "the smallest budget that works, as named by the error for a budget of one byte.",
    ),
    by_stage.PART: (
        "Modelled and measured seconds on a GPU",
        "Seconds of each action, as means over the microbatches, from the plan's timeline.",
    ),
    forks.PART: (
        "Fork and join on a GPU",
        "A step whose recomputation runs on a side stream, compared with the same step on one stream.",
    ),
    syncs.PART: (
        "Host synchronizations on a GPU",
        "Calls to CUDA's runtime in which the host waits for the device, counted by the profiler in the backward of a "
        "mixture of experts, and the operators in it that synchronize or decide.",
    ),
    longest.PART: ("The longest step on a GPU", "One row of tokens, with the model's parameters on the host."),
    "failed": ("Failed on a GPU", "What could not be measured."),
}
"""By part: heading and text, in the order of the page."""


def tables(folder: Path) -> list[str]:
    """Lines of the page: of each part and card the rows of the latest run that has some.

    Args:
        folder: of the results.
    """
    cards = [read_runs(path) for path in sorted(folder.glob("gpu_*.jsonl"))]
    return [
        line
        for part in _TEXTS
        for runs in cards
        if (run := latest(runs, part)) is not None
        for line in _lines(part, run)
    ]


def _lines(part: str, run: Run) -> Iterator[str]:
    heading, text = _TEXTS[part]
    machine = run.machine
    yield from ("", f"## {heading}: {machine['card']}", "")
    yield from (textwrap.fill(f"`python -m benchmarks.gpu`. {text}", 120), "")
    yield from table(_rows(run.rows))
    yield from ("", f"{machine['card']}, torch {machine['torch']}, transformers {machine['transformers']}.")


def _rows(rows: Sequence[Row]) -> list[Row]:
    """Rows with the same headings, without the part, and with nothing where a figure is not known."""
    headings = dict.fromkeys(heading for row in rows for heading in row if heading != "part")
    return [{heading: "" if row.get(heading) is None else row[heading] for heading in headings} for row in rows]
