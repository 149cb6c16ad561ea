"""Pipelined execution: simulated bubbles, RoundPipe's dispatch beside 1F1B, and what the runtime makes of it.

python -m benchmarks.pipeline [--device cpu|cuda] [--pairs 15]

1. The simulator beside the closed forms, with equal stages, up to 1,000 devices and 10,000 microbatches.
2. A language model whose head is as heavy as several layers, planned for 8 devices and 16 microbatches: 1F1B with the
   best contiguous partition, and RoundPipe's dispatch; recomputation for both or for neither.
3. The same for 4 devices and 8 microbatches within a budget halfway, and a tenth of the way, from the least to keeping
   everything: modelled makespan where recomputation stands right before its readers, and where what needs no gradient
   fills the wait for it.
4. Two workers with one core each beside one worker with one core, on four stages of 20 ms or more; and the measured
   makespan beside the simulator's, which is fed with the medians of the measured actions. Beside it what two threads
   that do not know of each other reach, for cores may share caches, clocks and a host with others.
5. What the runtime itself costs for each action.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import transformers
from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import paired_ratio, rates_of, report
from roundpipe_fx.planner import fill_waits
from roundpipe_fx.schedules import SCHEDULES, ActionKind, StepCosts, chain, gpipe, one_f_one_b, simulate_time

_SMALL_LLAMA = transformers.LlamaConfig(
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=8,
    num_attention_heads=8,
    vocab_size=8192,
    use_cache=False,
)
_WIDTH, _DEPTH, _ROWS, _MICROBATCHES = 1024, 16, 256, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    closed_forms()
    heavy_head()
    waits_filled()
    measured(options.device, options.pairs)
    overhead(options.device)


def closed_forms() -> None:
    rows = []
    for devices, microbatches in ((4, 8), (8, 16), (64, 512), (1000, 10_000)):
        graph = chain(devices)
        costs = StepCosts(seconds={step: 2.0 if step[0] is ActionKind.BACKWARD else 1.0 for step in graph.steps})
        expected = (devices - 1) / (microbatches + devices - 1)
        for make in (gpipe, one_f_one_b):
            began = time.perf_counter()
            schedule = make(devices, devices, microbatches)
            bubble = simulate_time(schedule, graph, costs).bubble
            rows.append(
                {
                    "schedule": schedule.name,
                    "devices": devices,
                    "microbatches": microbatches,
                    "actions": schedule.size,
                    "bubble": bubble,
                    "closed form": expected,
                    "difference": abs(bubble - expected),
                    "s to simulate": time.perf_counter() - began,
                }
            )
    report("pipeline_bubble", "simulated bubble beside the closed form, equal stages", rows)


def next_word(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a language model, of operators that have gradients on the meta device."""
    words = output.logits[:, :-1].flatten(0, 1).log_softmax(-1)
    return -words.gather(1, labels[:, 1:].flatten()[:, None]).mean()


def llama(tied: bool) -> tuple[nn.Module, torch.Tensor]:
    """Llama 3.2 1B on the meta device, its head tied to the embedding or not, and 16 sequences of 1,024 tokens."""
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128_256,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config).train(), torch.zeros(16, 1024, dtype=torch.long)


def heavy_head() -> None:
    """Llama 3.2 1B on the meta device: a vocabulary of 128,256 on layers of width 2,048."""
    rows = []
    for checkpoint in ("always", "never"):
        seconds: dict[str, float] = {}
        for schedule in ("1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev", "roundpipe"):
            torch._dynamo.reset()
            model, tokens = llama(tied=True)
            compiled = roundpipe_fx.compile(
                model, devices=["cpu"] * 8, num_microbatches=16, schedule=schedule, checkpoint=checkpoint
            )
            began = time.perf_counter()
            plan = compiled.trace(input_ids=tokens, labels=tokens, loss_fn=next_word)
            spent = time.perf_counter() - began
            assert plan.pipeline is not None
            seconds[schedule] = plan.pipeline.makespan
            rows.append(
                {
                    "checkpoint": checkpoint,
                    "schedule": schedule,
                    "stages": len(plan.stages),
                    "modelled s": plan.pipeline.makespan,
                    "bubble": plan.pipeline.bubble,
                    "highest peak GiB": max(plan.pipeline.peak_bytes) / 2**30,
                    "1f1b / this": seconds["1f1b"] / plan.pipeline.makespan,
                    "s to plan": spent,
                }
            )
    title = "Llama 3.2 1B, 8 devices, 16 microbatches (target: roundpipe 1.3)"
    report("pipeline_heavy_head", title, rows, rates_of("cpu"))


def waits_filled() -> None:
    """A Llama of 8 layers on the meta device, recomputed just in time and early."""
    rows = []
    for budget in (0.5, 0.1):
        for schedule in ("1f1b", "zero_bubble"):
            plans = {}
            for early in (False, True):
                torch._dynamo.reset()
                with torch.device("meta"):
                    model = transformers.LlamaForCausalLM(_SMALL_LLAMA).train()
                    tokens = torch.zeros(8, 512, dtype=torch.long)
                options = {"num_microbatches": 8, "schedule": schedule, "memory_budget": budget}
                compiled = roundpipe_fx.compile(model, devices=["cpu"] * 4, **options)
                with contextlib.nullcontext() if early else mock.patch.object(fill_waits, "_MOST_FILLED", 0):
                    plans[early] = compiled.trace(input_ids=tokens, labels=tokens, loss_fn=next_word)
            just_in_time, filled = plans[False].pipeline, plans[True].pipeline
            assert just_in_time is not None and filled is not None
            rows.append(
                {
                    "budget": budget,
                    "schedule": schedule,
                    "budget MiB": plans[True].budget / 2**20,
                    "highest peak MiB": max(filled.peak_bytes) / 2**20,
                    "recomputed ms": 1e3 * plans[True].recompute_seconds,
                    "early ms": 1e3 * sum(stage.early_seconds for stage in plans[True].stages),
                    "just in time s": just_in_time.makespan,
                    "waits filled s": filled.makespan,
                    "just in time / filled": just_in_time.makespan / filled.makespan,
                }
            )
    title = "Llama of 8 layers, 4 devices, 8 microbatches, within a budget (target: never longer)"
    report("pipeline_waits", title, rows, rates_of("cpu"))


class _Layers(nn.Module):
    def __init__(self, width: int = _WIDTH, depth: int = _DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def _squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def measured(device: str, pairs: int) -> None:
    cores = torch.get_num_threads()
    if device == "cpu" and cores < 2:
        raise SystemExit("two workers with one core each need two cores.")
    torch.manual_seed(0)
    rows = []
    devices = [device] * 2 if device == "cpu" or torch.cuda.device_count() < 2 else ["cuda:0", "cuda:1"]
    x = torch.randn(_ROWS * _MICROBATCHES, _WIDTH, device=device)
    y = torch.randn(_ROWS * _MICROBATCHES, _WIDTH, device=device)
    for schedule, spec in SCHEDULES.items():
        stages: Any = "auto" if spec.dispatches else 4
        options = {"num_microbatches": _MICROBATCHES, "schedule": schedule, "stages": stages, "cost": "measured"}
        one = roundpipe_fx.compile(_Layers().to(device), devices=devices[:1], **options)
        two = roundpipe_fx.compile(_Layers().to(device), devices=devices, **options)
        torch.set_num_threads(1)  # one worker takes all cores there are, two divide them
        _step(one, x, y)
        torch.set_num_threads(min(2, cores))
        _step(two, x, y)
        ratio, parallel, alone = paired_ratio(lambda: _step(two, x, y), lambda: _step(one, x, y), pairs, 2)  # noqa: B023
        makespans, predicted = _predicted(lambda: _step(two, x, y), two, runs=max(5, pairs // 2))  # noqa: B023
        bars = two.plan.timeline().measured
        stage_ms = [1e3 * (bar.end - bar.start) for bar in bars if bar.action.kind is ActionKind.FORWARD]
        rows.append(
            {
                "schedule": schedule,
                "forward of a stage ms": statistics.median(stage_ms),
                "one worker s": alone,
                "two workers s": parallel,
                "speed-up": 1 / ratio,
                **({"speed-up of the cores": _both_cores(pairs)} if device == "cpu" else {}),
                "makespan s": makespans,
                "simulated s": predicted,
                "measured / simulated": makespans / predicted,
            }
        )
        torch.set_num_threads(cores)
    title = "4 stages, two workers with one core each (targets: speed-up 1.7, measured / simulated within 10 %)"
    report(f"pipeline_measured_{device}", title, rows)


def _both_cores(pairs: int) -> float:
    """What two cores give at most: matrix products in two threads that do not know of each other, over one thread."""
    weight, rows = torch.randn(_WIDTH, _WIDTH), torch.randn(_ROWS, _WIDTH)

    def products() -> None:
        torch.set_num_threads(1)  # is the thread's own
        for _ in range(100):
            rows @ weight

    def at_once(threads: int) -> None:
        running = [threading.Thread(target=products) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    return 2 / paired_ratio(lambda: at_once(2), lambda: at_once(1), pairs)[0]


def _step(model: roundpipe_fx.CompiledModule, x: torch.Tensor, y: torch.Tensor) -> None:
    model.zero_grad()
    model.forward_backward(x, labels=y, loss_fn=_squares)
    if x.device.type == "cuda":
        torch.cuda.synchronize()


def _predicted(run: Callable[[], None], model: roundpipe_fx.CompiledModule, runs: int) -> tuple[float, float]:
    """Median measured makespan, and the simulator's with the median seconds of each step's actions."""
    spans: list[float] = []
    seconds: dict[Any, list[float]] = defaultdict(list)
    for _ in range(runs):
        run()
        bars = model.plan.timeline().measured
        spans.append(max(bar.end for bar in bars) - min(bar.start for bar in bars))
        for bar in bars:
            seconds[bar.action.step].append(bar.end - bar.start)
    timing = model.plan.timing
    assert timing is not None
    costs = StepCosts(seconds={step: statistics.median(found) for step, found in seconds.items()})
    return statistics.median(spans), simulate_time(timing.schedule, timing.graph, costs).makespan


def overhead(device: str) -> None:
    """A model that computes next to nothing: what is left is the runtime."""
    rows = []
    for workers, schedule in ((1, "1f1b"), (2, "1f1b"), (2, "zero_bubble")):
        model = roundpipe_fx.compile(
            _Layers(4, 8).to(device), devices=[device] * workers, stages=4, num_microbatches=32, schedule=schedule
        )
        x, y = torch.randn(32, 4, device=device), torch.randn(32, 4, device=device)
        for _ in range(10):
            _step(model, x, y)
        whole, inside, actions = [], [], 0
        for _ in range(50):
            began = time.perf_counter()
            _step(model, x, y)
            whole.append(time.perf_counter() - began)
            bars = model.plan.timeline().measured
            actions = len(bars)
            busy = [sum(bar.end - bar.start for bar in bars if bar.device == own) for own in range(workers)]
            last = [max(bar.end for bar in bars if bar.device == own) for own in range(workers)]
            counts = [sum(bar.device == own for bar in bars) for own in range(workers)]
            # One worker waits for nobody, so what is not in its actions is the runtime's own.
            inside.append((last[0] - busy[0]) / counts[0])
        computing = statistics.median(busy)
        rows.append(
            {
                "workers": workers,
                "schedule": schedule,
                "actions": actions,
                "step ms": 1e3 * statistics.median(whole),
                "in actions ms": 1e3 * computing,
                "between actions µs": 1e6 * statistics.median(inside),
                "step / actions µs": 1e6 * statistics.median(whole) / actions,
            }
        )
    title = "the runtime's own cost for each action (target: 100 µs; with two workers waits are in it)"
    report(f"pipeline_overhead_{device}", title, rows)


if __name__ == "__main__":
    main()
