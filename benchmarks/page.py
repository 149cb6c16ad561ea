"""The documentation's page of benchmarks with its plots, from the stored results: python -m benchmarks.page"""

from __future__ import annotations

import json
import shutil
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import tables
from benchmarks.markdown import table
from benchmarks.plots import PLOTS
from benchmarks.side_by_side import RESULTS

DOCS = RESULTS.parent.parent / "docs"
PICTURES = DOCS / "pictures"


@dataclass(frozen=True)
class _Part:
    """A benchmark on the page.

    Attributes:
        name: of the results file.
        heading: what it is about.
        command: which prints it.
        text: what is measured, and how to read it.
        pictures: files with what they show, beside the table.
    """

    name: str
    heading: str
    command: str
    text: str
    pictures: tuple[tuple[str, str], ...] = ()


_PARTS = (
    _Part(
        "frontier_summary",
        "Memory and recomputation",
        "benchmarks.frontier",
        "Eight models at eleven budgets each, compared with eager PyTorch, `torch.utils.checkpoint` per block, "
        "`torch.compile`'s `activation_memory_budget` and rotor's optimum. Peaks are measured. Recomputation is given "
        "in modelled seconds, from the cost table of the CPU. Steps are timed in pairs.",
        (
            ("frontier.png", "Measured peaks against modelled recomputation, eight models and their peers"),
            ("lowest_peaks.svg", "The lowest peak of each way to train a model, as a fraction of eager PyTorch's"),
            ("step_times.svg", "Seconds of a step compared with each peer's, at the peer's peak"),
        ),
    ),
    _Part(
        "peak_memory",
        "Peak with the same checkpoints",
        "benchmarks.peak_memory",
        "Peak of a training step that saves the same values as `torch.utils.checkpoint` per block.",
    ),
    _Part(
        "accumulation",
        "Gradient accumulation",
        "benchmarks.accumulation",
        "Eight microbatches on one device, compared with a loop of `backward()` calls, with and without checkpoints.",
    ),
    _Part(
        "host_syncs",
        "Host synchronizations",
        "benchmarks.host_syncs",
        "Number of host synchronizations in the backward.",
    ),
    _Part(
        "bits",
        "Bitwise equality",
        "benchmarks.bits",
        "Number of gradients that differ from `aot_eager` in at least one bit.",
    ),
    _Part(
        "architectures_summary",
        "Architectures",
        "benchmarks.architectures",
        "One small model for each architecture in Hugging Face's auto classes that can be built and run eagerly.",
    ),
    _Part(
        "inductor",
        "Stages compiled by Inductor",
        "benchmarks.inductor",
        "Each cell has three figures: the peak of the resident set during a step minus its size before the step (with "
        "the planned peak in brackets), the processor seconds of a step, and those of the first step, which compiles. "
        "They are compared with `torch.compile`, with and without `activation_memory_budget`. The number in a column's "
        "heading is the budget; *as 0.5* means that the budget is the number of bytes that `torch.compile` was "
        "measured to need at 0.5. The planned figure counts the bytes that the allocator hands out; the resident set "
        "of a small model may grow by less. Empty cells were not measured.",
    ),
    _Part(
        "inductor_steps",
        "Time of compiled stages",
        "benchmarks.inductor_steps",
        "The time of a step, measured more precisely: both variants take turns in one process, with one thread. A "
        "ratio below 1 means less time than the peer. If the peer has a budget, ours is the number of bytes that the "
        "peer was measured to need.",
    ),
    _Part(
        "budget_curve",
        "Lower budgets, lower peaks",
        "benchmarks.budget_curve",
        "A decoder of 32 layers, as in the report that a smaller `activation_memory_budget` needs more memory "
        "([pytorch#197838](https://github.com/pytorch/pytorch/issues/197838)). Each cell has the peak of the resident "
        "set during a step minus its size before the step (with the planned peak in brackets), the processor seconds "
        "of a step, and those of the first step. The two budgets mean different things. `torch.compile`'s is a "
        "fraction of the saved bytes. Ours is a fraction of the range between the lowest peak and the peak of saving "
        "everything.",
    ),
    _Part(
        "scripts",
        "The same script three ways",
        "benchmarks.scripts",
        "A Llama with a vocabulary of 32 K in a plain loop, in Hugging Face's Trainer, and with LoRA in TRL's "
        "SFTTrainer. Each script runs unchanged, with its own checkpointing switched on, and with one line of ours. "
        "The figures are the peak of the resident set during a step, including the optimizer, minus its size before "
        "the step, and the processor seconds.",
    ),
    _Part(
        "step_time",
        "Time of a step",
        "benchmarks.step_time",
        "If nothing is recomputed, a step should take as long as with `aot_eager`.",
    ),
    _Part(
        "step_overhead",
        "Overhead of a step",
        "benchmarks.step_time",
        "A model so small that a step consists mostly of entering and leaving the compiled code.",
    ),
    _Part(
        "stage_overhead",
        "Many stages",
        "benchmarks.stage_overhead",
        "A decoder of 12 layers at batch size 1, so small that only the host's work takes time. It runs with one stage "
        "per layer and, for comparison, in one piece. Programs call stages line by line, without a loop.",
    ),
    _Part(
        "stage_calls",
        "Calls with many stages",
        "benchmarks.stage_overhead",
        "Calls made by Inductor's code in the same step. Separate stages have more kernels, buffers and views than one "
        "piece: each writes to memory what the next one reads, none reuses another's buffers, and backward stages "
        "repeat operations whose results the forward did not save. Buffers, views and checks are timed in isolation; "
        "*of the step* is the time of the additional ones, as a fraction of the step in one piece. Between two stages, "
        "two of our Python functions run.",
    ),
    _Part(
        "before",
        "Compared with an earlier version",
        "benchmarks.before",
        "The same models with this repository's code before there was a single planner and before plans accounted for "
        "Inductor's code (commit 92ea36c).",
    ),
    _Part(
        "first_step",
        "The first step",
        "benchmarks.first_step",
        "The time of the first step, including tracing, planning and compilation. Each run is a process of its own, in "
        "which Inductor uses one thread. Identical stages are compiled once.",
    ),
    _Part(
        "planning",
        "Planning",
        "benchmarks.planning",
        "Seconds to find a plan within a budget, compared with the seconds that PyTorch takes to trace the model.",
    ),
    _Part(
        "plan_cache",
        "Plans from disk",
        "benchmarks.planning",
        "The same model and options in a second process, which finds the plan on disk.",
    ),
    _Part(
        "plan_page",
        "The page of a plan",
        "benchmarks.plan_page",
        "The page for a model of 8B parameters: the CPU seconds to write it, and the milliseconds from a key press to "
        "the drawn picture in headless Chromium.",
    ),
    _Part(
        "pipeline_bubble",
        "Simulated bubbles (modelled)",
        "benchmarks.pipeline",
        "The simulator compared with the closed form, for stages of equal duration.",
    ),
    _Part(
        "pipeline_measured_cpu",
        "Pipelines on two cores",
        "benchmarks.pipeline",
        "Two workers with one core each: the speed-up, and the simulated makespan compared with the measured one.",
    ),
    _Part(
        "processes",
        "Two processes",
        "benchmarks.processes",
        "Two processes with one core each, over gloo, compared with PyTorch's pipeline, DistributedDataParallel and "
        "FSDP2. A ratio is our figure divided by that of the peer in the same row. With replicas and shards, each "
        "process has half of the batch, as with the peers, and the budget is the peer's peak.",
    ),
    _Part(
        "processes_makespan",
        "Makespan over two processes",
        "benchmarks.processes",
        "The time from the start of the first action to the end of the last one.",
    ),
    _Part(
        "growth",
        "Memory growth over a thousand steps",
        "benchmarks.growth",
        "Growth between step 250 and step 1,000, on the process with the largest difference.",
    ),
    _Part(
        "pipeline_heavy_head",
        "A heavy head (modelled)",
        "benchmarks.pipeline",
        "A language model whose head is its heaviest stage, on eight simulated devices.",
        (("heavy_head.svg", "Modelled seconds of a step and highest peak of a device, by schedule"),),
    ),
    _Part(
        "pipeline_waits",
        "Recomputation during waits (modelled)",
        "benchmarks.pipeline",
        "Recomputation that runs while a device waits for a gradient.",
    ),
    _Part(
        "published",
        "Published runs (modelled)",
        "benchmarks.published",
        "These runs are planned, not executed. They are compared with figures that torchtitan publishes for H100s "
        "(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, "
        "without float8) and for A100s with FSDP alone "
        "(https://github.com/pytorch/torchtitan/blob/main/docs/performance.md). No figure was fitted. Those H100s have "
        "96 GB at 2.4 TB/s and a power limit of 500 W; the plans are for 80 GB at 3.35 TB/s. Sequences are assumed to "
        "have 8,192 tokens, torchtitan's default. Runs with tensor parallelism are in the next table. The model omits "
        "the optimizer's step and parameters in float32. What is recomputed follows from the devices' memory and not "
        "from the published settings. The last three rows are for 1,024 devices and have no published counterpart; in "
        "the last one, the planner also chose the division of the devices and the schedule.",
    ),
    _Part(
        "published_parallel",
        "Published runs with tensor parallelism (modelled)",
        "benchmarks.published_parallel",
        "These runs are planned, not executed. Each layer is split across eight devices, so a mesh is given as "
        "replicas × groups in a pipeline × 8. The Llama rows are torchtitan's runs on H100s (tables 4 and 5 of the "
        "page above). They use float8, whose products are faster than those in bfloat16, which the plans assume; the "
        "number of microbatches for 405B is the default of that time. The GPT rows are Megatron's runs on A100s: "
        "https://arxiv.org/abs/2205.05198, with sequence parallelism and selective recomputation, and, where "
        "everything is recomputed, https://arxiv.org/abs/2104.04473, table 1, with seconds derived from the paper's "
        "count of operations and microbatches of one row. No figure was fitted. Plans do not hide the communication of "
        "tensor parallelism. The model omits the optimizer's step, parameters in float32, and dropout. What is "
        "recomputed follows from the devices' memory and not from the published settings. Most of the planning time is "
        "PyTorch's tracing, on the CPU.",
    ),
    _Part(
        "tiling_lowest",
        "Lowest peaks with tiles",
        "benchmarks.tiling",
        "Language models with a vocabulary of 32,768 that return only their loss. All gradients exist at the end of a "
        "step, so no peak can be lower than their bytes.",
    ),
    _Part(
        "tiling",
        "Compared with hand-written tiles",
        "benchmarks.tiling",
        "The peers use `torch.utils.checkpoint` around each layer and compute the loss in tiles, written as their "
        "users would write it; for the long sequence they tile the MLP too. Steps are timed in pairs, with the peer's "
        "peak as our budget.",
    ),
    _Part(
        "tiling_vocabulary",
        "Loss heads in tiles of the vocabulary (modelled)",
        "benchmarks.tiling_vocabulary",
        "Planned, not executed: the final norm, linear layer and loss of a model, in bfloat16 with float32 logits. The "
        "table shows the lowest memory that is reached by tiles of rows and by tiles of the vocabulary, and the "
        "seconds of a step at that point. The gradient of the weight exists when the step ends. Buffers that PyTorch's "
        "kernels allocate internally are counted, such as partial sums over the rows for the gradient of the norm's "
        "weight.",
    ),
    _Part(
        "tiling_planning",
        "Planning with tiles",
        "benchmarks.tiling",
        "CPU seconds of planning within the peak of the peer that needs the least memory, and within the smallest "
        "budget that needs no tiles.",
    ),
    _Part(
        "host_updates",
        "The optimizer on the host",
        "benchmarks.host_optimizer",
        "AdamW of PyTorch and, if it is installed, of DeepSpeed, compared with a copy of the same number of bytes.",
    ),
    _Part(
        "host_optimizer",
        "Updates that overlap with the backward",
        "benchmarks.host_optimizer",
        "The backward either computes or waits, as it would for a device, for as long as the updates take. Both have "
        "one thread.",
    ),
    _Part(
        "offloaded",
        "Models whose weights are on the host (modelled)",
        "benchmarks.offloaded",
        "Planned, not executed: forward and backward, without an optimizer. Attention uses the kernel's causal mask, "
        "as in eager PyTorch. *Recomputing and waiting for nothing* means that these operations run once each, at "
        "these rates. RoundPipe publishes its figures for one RTX 4090 and sequences of 2,048 tokens, in float16 with "
        "float16 accumulation (which on this GPU is twice as fast as float32 accumulation), and with an optimizer step "
        "that is applied one step late, beside the next step. Only plans for such sequences, with the same "
        "accumulation, are compared with these figures; they include no optimizer step, which would be added if it ran "
        "synchronously. Plans for other lengths are in bfloat16 and have no published counterpart: RoundPipe publishes "
        "no speed for the longest sequences that it trains (49 K, 73 K and 28 K tokens). `python -m benchmarks.gpu` "
        "runs both systems on one device, in bfloat16, with synchronous and with stale optimizer steps.",
    ),
    _Part(
        "host_tier",
        "Offloading the values of a model on a GPU (modelled)",
        "benchmarks.host_tier",
        "Planned, not executed: bfloat16, rows of 4,096 tokens, within 90 % of the device's memory minus the weights. "
        "Without microbatches, copies are hidden, so each value that is offloaded instead of recomputed shortens the "
        "step. With microbatches, a device may wait for copies. Most of the CPU seconds of planning are PyTorch's "
        "tracing.",
    ),
    _Part(
        "longest",
        "The longest sequences on one GPU (modelled)",
        "benchmarks.longest",
        "Planned, not executed: one sequence, bfloat16, forward and backward, for models that return only their loss, "
        "within 90 % of the device's memory minus the weights that stay on it. Tiles are used wherever they shorten "
        "the step. The ratio compares the step with a lower bound: its own operations, attention included, run once "
        "each without recomputation or waiting. The column *binds* names the bottleneck, the resource that a shorter "
        "step would need more of. If a step does not fit, the peak shown is the lowest that was found.",
    ),
    _Part(
        "published_kernels",
        "Rates of kernels (modelled and published)",
        "benchmarks.published_kernels",
        "The rates that plans for an RTX 4090 assume, compared with published measurements. Matrix products are those "
        "inside a model, where they are slower than in isolation. A copy that runs at the same time as one in the "
        "opposite direction is modelled with 0.78 of the rate over PCIe 4 and 0.9 over PCIe 5; on a machine with eight "
        "RTX 4090 it was measured to have 0.58.",
    ),
    _Part(
        "tiling_offloaded",
        "Long sequences on one GPU (modelled)",
        "benchmarks.tiling",
        "Planned, not executed: a Llama of 8B parameters whose weights stay on the host.",
    ),
)


def page() -> str:
    """The page as text."""
    parts = [
        "# Benchmarks",
        "",
        "Each table shows the latest output of its command, with the versions of the libraries. `make bench` runs all",
        "commands. Comparisons are ratios within one run, since the seconds of one machine say little about another.",
        "Results that were planned and not executed are modelled; their headings say so, and the rates of the model",
        "are given below the table. [On a GPU](on-a-gpu.md) has what was measured on a GPU, and the command that",
        "measures it. `python -m benchmarks.page` writes this page.",
        *tables(RESULTS),
    ]
    for part in _PARTS:
        if not (RESULTS / f"{part.name}.json").exists():  # was not run on an idle machine yet
            continue
        found = json.loads((RESULTS / f"{part.name}.json").read_text())
        pictures = [line for name, text in part.pictures for line in (f"![{text}](pictures/{name})", "")]
        parts += [
            "",
            f"## {part.heading}",
            "",
            textwrap.fill(f"`python -m {part.command}`. {part.text}", 120),
            "",
            *pictures,
        ]
        parts += [f"*{found['title']}*", "", *table(found["rows"]), "", _machine(found)]
    return "\n".join(parts) + "\n"


def _machine(found: dict[str, Any]) -> str:
    rates = f"Rates: {found['rates']}. " if "rates" in found else ""
    threads = "1 thread" if found["cores"] == 1 else f"{found['cores']} threads"
    return f"{rates}{threads}, torch {found['torch']}, transformers {found['transformers']}."


def main() -> None:
    (DOCS / "benchmarks.md").write_text(page())
    PICTURES.mkdir(exist_ok=True)
    shutil.copyfile(Path(RESULTS, "frontier.png"), PICTURES / "frontier.png")
    for name, draw in PLOTS.items():
        draw().savefig(PICTURES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
