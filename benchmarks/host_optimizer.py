"""The optimizer's step on the host beside the backward, and one after the other.

python -m benchmarks.host_optimizer [--pairs N] [--width W] [--depth D]

First the update alone, of float32 parameters on all threads: PyTorch's AdamW, and DeepSpeed's for CPUs if ``deepspeed``
is installed, beside a copy of as many bytes as an update at least reads and writes.

DeepSpeed compiles its optimizer at the first use, with g++. To have it beside this environment instead of in it:

    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation --target ds deepspeed ninja py-cpuinfo hjson msgpack \\
        pydantic pydantic-core annotated-types typing-inspection einops
    PATH=$PWD/ds/bin:$PATH PYTHONPATH=$PWD/ds python -m benchmarks.host_optimizer

A chain of blocks on the CPU, run by one thread; the optimizer's updates have another thread. The backward takes as long
as the optimizer's step, because the batch has that many rows; or because it waits that long, as the host does while a
device computes. Stages are what is updated together. A step after which nobody waits (``synchronize=False``) has its
last updates beside the next forward.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import console, fresh, paired, report, seconds_of

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
}
ROWS = 256


@torch.library.custom_op("roundpipe_fx_benchmarks::on_device", mutates_args=())
def on_device(x: torch.Tensor, seconds: float) -> torch.Tensor:
    """The identity; its backward takes so long."""
    return x.clone()


@torch.library.custom_op("roundpipe_fx_benchmarks::waits", mutates_args=())
def waits(gradient: torch.Tensor, seconds: float) -> torch.Tensor:
    """Waits as for a device."""
    time.sleep(seconds)
    return gradient.clone()


on_device.register_fake(lambda x, seconds: torch.empty_like(x))
waits.register_fake(lambda gradient, seconds: torch.empty_like(gradient))
on_device.register_autograd(
    lambda ctx, gradient: (waits(gradient, ctx.seconds), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "seconds", inputs[1]),
)


class Blocks(nn.Module):
    """A chain of residual blocks, each of which waits in its backward, if asked to."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.seconds = 0.0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
            if self.seconds:
                x = on_device(x, self.seconds)
        return x.square().mean()


def updates(model: nn.Module, pairs: int) -> list[dict[str, Any]]:
    """Seconds of an update with each optimizer, beside the bound by memory."""

    def stepping(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Callable[[], float]:
        parameters = [*copy.deepcopy(model).parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = make(parameters)
        return lambda: seconds_of(optimizer.step)

    count = sum(parameter.numel() for parameter in model.parameters())
    # An update reads a parameter, its gradient and two moments, and writes all but the gradient: 28 bytes.
    source, target = torch.ones(count * 7 // 2), torch.empty(count * 7 // 2)
    clocks = {name: stepping(make) for name, make in OPTIMIZERS.items()}
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        console.print("DeepSpeed is not installed: pip install deepspeed")
    else:
        clocks["DeepSpeedCPUAdam"] = stepping(DeepSpeedCPUAdam)
    clocks["copy"] = lambda: seconds_of(lambda: target.copy_(source))
    took = paired(clocks, pairs)
    return [
        {
            "update": name,
            "ms": statistics.median(own[name] for own in took) * 1e3,
            "of AdamW fused": statistics.median(own[name] / own["AdamW fused"] for own in took),
            "GB/s": 28 * count / 1e9 / statistics.median(own[name] for own in took),
        }
        for name in clocks
    ]


def seconds_alone(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, width: int) -> tuple[float, float]:
    """Seconds of a backward, eager, and of the optimizer's step."""
    x = torch.randn(rows, width)
    backwards, steps = [], []
    for _ in range(5):
        loss = model(x)
        backwards.append(seconds_of(loss.backward))
        steps.append(seconds_of(optimizer.step))
        optimizer.zero_grad()
    return statistics.median(backwards[1:]), statistics.median(steps[1:])


def steps_of(
    model: nn.Module, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], x: torch.Tensor, depth: int
) -> dict[str, Callable[[], None]]:
    """A training step in each of the ways, of models of their own."""

    def compiled() -> tuple[roundpipe_fx.CompiledModule, torch.optim.Optimizer]:
        own = roundpipe_fx.compile(copy.deepcopy(model), devices=["cpu"], num_microbatches=1, stages=depth)
        return own, make([*own.parameters()])

    after, optimizer_after = compiled()
    within, optimizer_within = compiled()
    ahead, optimizer_ahead = compiled()

    def one_after_the_other() -> None:
        after.forward_backward(x)
        after.step(optimizer_after)

    def beside() -> None:
        within.forward_backward(x, optimizer=optimizer_within)

    def without_waiting() -> None:
        ahead.forward_backward(x, optimizer=optimizer_ahead, synchronize=False)

    return {"after": one_after_the_other, "beside": beside, "without waiting": without_waiting}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--pairs", type=int, default=5, help="rounds of steps in each way")
    parser.add_argument("--width", type=int, default=512, help="width of the blocks")
    parser.add_argument("--depth", type=int, default=8, help="number of blocks, and of stages")
    arguments = parser.parse_args()
    width, depth = arguments.width, arguments.depth
    torch.manual_seed(0)
    model = Blocks(width, depth)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    report(
        "host_updates", f"an update of {millions:.1f} M float32 parameters on the host", updates(model, arguments.pairs)
    )
    torch.set_num_threads(1)
    rows = []
    for name, make, waiting in fresh([(*own, waiting) for own in OPTIMIZERS.items() for waiting in (True, False)]):
        own = copy.deepcopy(model)
        count = 1 if waiting else ROWS
        optimizer = make([*own.parameters()])
        backward, update = seconds_alone(own, optimizer, count, width)
        if waiting:
            own.seconds = max(update - backward, 0.0) / depth
        else:
            count = max(1, round(ROWS * update / backward))
        backward, update = seconds_alone(own, optimizer, count, width)
        steps = steps_of(own, make, torch.randn(count, width), depth)
        clocks = {way: lambda step=step: seconds_of(step) for way, step in steps.items()}
        took = paired(clocks, arguments.pairs)
        medians = {way: statistics.median(own[way] for own in took) for way in steps}
        rows.append(
            {
                "optimizer": name,
                "backward": "waits" if waiting else f"{count} rows",
                "backward ms": backward * 1e3,
                "update ms": update * 1e3,
                "after it ms": medians["after"] * 1e3,
                "beside it ms": medians["beside"] * 1e3,
                "not waiting ms": medians["without waiting"] * 1e3,
                "after / beside": statistics.median(own["after"] / own["beside"] for own in took),
                "after / not waiting": statistics.median(own["after"] / own["without waiting"] for own in took),
            }
        )
    title = f"the optimizer's step after the backward and beside it, on two threads; {millions:.1f} M parameters"
    report("host_optimizer", title, rows)


if __name__ == "__main__":
    main()
