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
        "Eight models at eleven budgets each, beside eager, `torch.utils.checkpoint` per block, `torch.compile`'s "
        "`activation_memory_budget` and rotor's optimum. Peaks are measured; recomputation is in seconds modelled with "
        "the table of the CPU; steps are timed in pairs.",
        (
            ("frontier.png", "Measured peaks against modelled recomputation, eight models beside their peers"),
            ("lowest_peaks.svg", "The lowest peak of each way to train a model, as a share of eager's"),
            ("step_times.svg", "Seconds of a step beside each peer's, at the peer's peak"),
        ),
    ),
    _Part(
        "peak_memory",
        "The same checkpoints",
        "benchmarks.peak_memory",
        "Peak of a training step that saves what `torch.utils.checkpoint` per block saves.",
    ),
    _Part(
        "accumulation",
        "Gradient accumulation",
        "benchmarks.accumulation",
        "Eight microbatches on one device, beside a loop of `backward()` calls, with and without checkpoints.",
    ),
    _Part(
        "host_syncs",
        "Host synchronizations",
        "benchmarks.host_syncs",
        "How often the backward makes the host wait for the device.",
    ),
    _Part(
        "bits",
        "Right to the bit",
        "benchmarks.bits",
        "Gradients that differ from `aot_eager` in any bit.",
    ),
    _Part(
        "architectures_summary",
        "Architectures",
        "benchmarks.architectures",
        "A small model of each architecture of Hugging Face's auto classes that could be built and run eagerly.",
    ),
    _Part(
        "inductor",
        "Stages compiled by Inductor",
        "benchmarks.inductor",
        "Peak of the resident set above that before the step (in brackets what was planned), processor seconds of a "
        "step, and of the first one, which compiles, beside `torch.compile` with and without "
        "`activation_memory_budget`. The number is the budget; *as 0.5* has as many bytes for its budget as "
        "`torch.compile` was measured to need with 0.5. The plan's are bytes that the allocator hands out; a small "
        "model's resident set may grow by less. Empty cells were not measured.",
    ),
    _Part(
        "inductor_steps",
        "Seconds of compiled stages",
        "benchmarks.inductor_steps",
        "The seconds of a step without a budget again, more precisely: both ways take turns in one process, with one "
        "thread. Ratios below 1 are less time than with `torch.compile`.",
    ),
    _Part(
        "budget_curve",
        "Lower budgets, lower peaks",
        "benchmarks.budget_curve",
        "A decoder of 32 layers, as in the report that a smaller `activation_memory_budget` needs more memory "
        "([pytorch#197838](https://github.com/pytorch/pytorch/issues/197838)). Peak of the resident set above that "
        "before the step (in brackets what was planned), processor seconds of a step, and seconds of the first one. "
        "The two budgets mean different things: that of `torch.compile` is a share of the bytes that are saved, ours "
        "of the way from the lowest peak to that of saving everything.",
    ),
    _Part(
        "scripts",
        "The same script three ways",
        "benchmarks.scripts",
        "A Llama with 32 K words in a plain loop, in Hugging Face's Trainer, and with LoRA in TRL's SFTTrainer: as the "
        "script is, with its own checkpointing switched on, and with one line of ours. Peak of the resident set in a "
        "step, the optimizer's included, above that before the step, and processor seconds.",
    ),
    _Part(
        "step_time",
        "Time of a step",
        "benchmarks.step_time",
        "Where nothing is recomputed, a step costs what `aot_eager`'s costs.",
    ),
    _Part(
        "step_overhead",
        "Time around a step",
        "benchmarks.step_time",
        "A model so small that only the way into and out of it takes time.",
    ),
    _Part(
        "stage_overhead",
        "Many stages",
        "benchmarks.stage_overhead",
        "A decoder of 12 layers, at batch 1 and so small that only what the host does takes time, with a stage a "
        "layer, beside the same step in one piece. Programs call stages line by line, without a loop.",
    ),
    _Part(
        "stage_calls",
        "Calls of many stages",
        "benchmarks.stage_overhead",
        "Calls of Inductor's code in the same step, counted. Stages have more kernels, buffers and views than one "
        "piece: each writes to memory what the next one reads, none reuses a buffer of another, and backward stages "
        "repeat operations that the forward did not save. Buffers, views and checks are timed alone: *of the step* is "
        "what the additional ones take, as a part of the step in one piece. Between two stages two Python functions of "
        "ours run.",
    ),
    _Part(
        "before",
        "Beside an earlier version",
        "benchmarks.before",
        "The same models with this repository's code before there was one planner, and plans were made for Inductor's "
        "code (92ea36c).",
    ),
    _Part(
        "first_step",
        "The first step",
        "benchmarks.first_step",
        "Tracing, planning and compiling included, in processes of their own, Inductor with one thread. Stages that "
        "are alike are compiled once.",
    ),
    _Part(
        "planning",
        "Planning",
        "benchmarks.planning",
        "Seconds for a plan within a budget, beside those that PyTorch takes to trace the model.",
    ),
    _Part(
        "plan_cache",
        "Plans from disk",
        "benchmarks.planning",
        "The same model and options in a second process.",
    ),
    _Part(
        "plan_page",
        "The page of a plan",
        "benchmarks.plan_page",
        "An 8B-parameter model's page: CPU seconds until it is written, and milliseconds from a key to the drawn "
        "picture, in headless Chromium.",
    ),
    _Part(
        "pipeline_bubble",
        "Simulated bubbles (modelled)",
        "benchmarks.pipeline",
        "The simulator beside the closed form, for stages that take equally long.",
    ),
    _Part(
        "pipeline_measured_cpu",
        "Pipelines on two cores",
        "benchmarks.pipeline",
        "Two workers with one core each: speed-up, and the simulated makespan beside the measured one.",
    ),
    _Part(
        "processes",
        "Two processes",
        "benchmarks.processes",
        "One core each, on gloo, beside PyTorch's pipeline, DistributedDataParallel and FSDP2. A ratio is ours divided "
        "by that of the peer beside it. Replicas and shards have half of the batch in each process, as their peers, "
        "and the peak of their peers as a budget.",
    ),
    _Part(
        "processes_makespan",
        "The makespan over two processes",
        "benchmarks.processes",
        "From the first action's start to the last one's end.",
    ),
    _Part(
        "growth",
        "A thousand steps over processes",
        "benchmarks.growth",
        "What is there after the last step beyond what was there after the first quarter, on the process where they "
        "differ most.",
    ),
    _Part(
        "pipeline_heavy_head",
        "A heavy head (modelled)",
        "benchmarks.pipeline",
        "A language model whose head is its heaviest stage, over eight simulated devices.",
        (("heavy_head.svg", "Modelled seconds of a step and highest peak of a device, by schedule"),),
    ),
    _Part(
        "pipeline_waits",
        "Waits that are filled (modelled)",
        "benchmarks.pipeline",
        "Recomputation that runs while a device waits for a gradient.",
    ),
    _Part(
        "published",
        "Published runs (modelled)",
        "benchmarks.published",
        "Planned, not run, beside what torchtitan publishes for H100s "
        "(https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3, "
        "without float8) and for A100s with FSDP alone "
        "(https://github.com/pytorch/torchtitan/blob/main/docs/performance.md). Nothing was fitted. Those H100s have "
        "96 GB at 2.4 TB/s and a power limit of 500 W; plans are for 80 GB at 3.35 TB/s. Sequences are taken to have "
        "8,192 tokens, torchtitan's default. Runs with tensor parallelism are in the "
        "next table. Not modelled: the optimizer's step, parameters in float32. What is recomputed is decided by "
        "the devices' memory, not as published. The last rows are for 1,024 devices, and have no published "
        "counterpart; of the last one, the division of the devices and the schedule are chosen.",
    ),
    _Part(
        "published_parallel",
        "Published runs with tensor parallelism (modelled)",
        "benchmarks.published_parallel",
        "Planned, not run, with layers shared out by eight devices: replicas × groups "
        "in a pipeline × 8. Llama are torchtitan's runs on H100s, tables 4 and 5 of the page above, with float8, "
        "whose products are faster than those of bfloat16, for which the plans are; the microbatches of 405B are the "
        "default of that time. GPT are Megatron's "
        "on A100s: https://arxiv.org/abs/2205.05198, with sequence parallelism and selective recomputation; where "
        "all is recomputed, https://arxiv.org/abs/2104.04473, table 1, with seconds by the paper's count of "
        "operations and microbatches of one row. Nothing was fitted. Communication of tensor parallelism is not "
        "hidden in plans. Not modelled: the optimizer's step, parameters in float32, dropout. What is recomputed "
        "is decided by the devices' memory, not as published. Most of the planning is PyTorch's tracing; its "
        "seconds are those of the CPU.",
    ),
    _Part(
        "tiling_lowest",
        "The lowest peaks in tiles",
        "benchmarks.tiling",
        "Language models with 32,768 words that return only their loss. All gradients exist at the end of a step: no "
        "peak is lower than these.",
    ),
    _Part(
        "tiling",
        "Beside tiles by hand",
        "benchmarks.tiling",
        "Peers have `torch.utils.checkpoint` around each layer and the loss in tiles, written as their users write it; "
        "for the long sequence, the MLP too. Steps are timed in pairs at the peer's peak, which is our budget.",
    ),
    _Part(
        "tiling_vocabulary",
        "Loss heads in tiles of their words (modelled)",
        "benchmarks.tiling_vocabulary",
        "Planned, not run: the norm, the linear layer and the loss that a model ends with, in bfloat16 with float32 "
        "logits. The least memory that tiles of rows reach, and what tiles of words reach; seconds of the step there. "
        "The gradient of the weight exists when a step ends. Buffers that PyTorch's kernels allocate for themselves "
        "count, such as partial sums over the rows for the gradient of the norm's weight.",
    ),
    _Part(
        "tiling_planning",
        "Planning with tiles",
        "benchmarks.tiling",
        "CPU seconds of planning within the peak of the leanest peer, and within the least budget that needs no tiles.",
    ),
    _Part(
        "host_updates",
        "The optimizer on the host",
        "benchmarks.host_optimizer",
        "AdamW of PyTorch and of DeepSpeed, if that is installed, and a copy of as many bytes.",
    ),
    _Part(
        "host_optimizer",
        "Updates beside the backward",
        "benchmarks.host_optimizer",
        "A backward that computes, or waits as for a device, as long as the updates take, with one thread for each.",
    ),
    _Part(
        "offloaded",
        "Models on the host (modelled)",
        "benchmarks.offloaded",
        "Planned, not run: forward and backward, without an optimizer. Attention has the kernel's causal mask, as "
        "where nothing is traced. *Recomputing and waiting for nothing*: these operations at these rates, each run "
        "once. RoundPipe's figures are published for one RTX 4090 and sequences of 2,048 tokens, in float16 whose "
        "products sum in float16 (on this GPU at twice the rate of sums in float32), with an optimizer's step that is "
        "applied one step late, beside the next step. Only plans of such sequences stand beside them, with such sums; "
        "they have no optimizer's step, which synchronously would come on top. Plans of other lengths are in bfloat16, "
        "and have no published counterpart: of the longest sequences that RoundPipe trains (49 K, 73 K and 28 K "
        "tokens) it publishes no speed. `python -m benchmarks.gpu` runs both on one device, in bfloat16, synchronous "
        "and stale.",
    ),
    _Part(
        "host_tier",
        "Values of models on a GPU that leave for the host (modelled)",
        "benchmarks.host_tier",
        "Planned, not run: bfloat16, rows of 4,096 tokens, within 90 % of the device's memory without the weights. "
        "Without microbatches copies are hidden, so what is not recomputed makes the step shorter; with them a device "
        "may wait for copies. CPU seconds of planning are mostly those of PyTorch's tracing.",
    ),
    _Part(
        "longest",
        "The longest sequences on one GPU (modelled)",
        "benchmarks.longest",
        "Planned, not run: one sequence, bfloat16, forward and backward, models that return only their loss, within "
        "90 % of the device's memory without weights that are there, with tiles wherever they pay. The "
        "ratio is a step over its own operations run once, attention included, with nothing recomputed and nothing "
        "waited for, which is the bound. What binds is what a shorter step would need more of. Where a step does not "
        "fit, the peak is the least that was found.",
    ),
    _Part(
        "published_kernels",
        "Rates of kernels (modelled and published)",
        "benchmarks.published_kernels",
        "The rates that plans for an RTX 4090 assume, beside measured ones that their sources publish. Products are "
        "those inside a model, where they are slower than alone. A copy beside another one in the opposite direction "
        "is modelled with 0.78 of the rate over PCIe 4, and 0.9 over PCIe 5; on a machine with eight RTX 4090 it has "
        "0.58 of that.",
    ),
    _Part(
        "tiling_offloaded",
        "Long sequences on one GPU (modelled)",
        "benchmarks.tiling",
        "Planned, not run: a Llama of 8B parameters that stays on the host.",
    ),
)


def page() -> str:
    """The page as text."""
    parts = [
        "# Benchmarks",
        "",
        "Each table is what its command printed last, with the versions that it ran with. `make bench` runs all. Where",
        "two things are compared, figures are ratios within one run: seconds of one machine say little about another.",
        "What was planned and not run is modelled, as its heading says, with the rates that are named below its table.",
        "[On a GPU](on-a-gpu.md) says what was measured on one, and which command measures it now.",
        "`python -m benchmarks.page` writes this page.",
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
