"""Random models whose values may leave CUDA devices: no bit changes, and neither tier holds more than it may."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.runtime.host_buffers import HostBuffers
from tests.comparison import Step, assert_bitwise
from tests.long import long_but
from tests.pipeline.steps import assert_close, left_behind

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("deterministic"),
]

WIDTH = 32


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Views(nn.Module):
    """Values that share their memory, of which parts are read."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.wide(x).chunk(4, -1)
        return x + self.out(torch.sigmoid(a) * b) + (c[::2].sin().mean() * d.clamp(-2, 2).exp()).cos()


class Routed(nn.Module):
    """As many rows as the data say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate(x)
        (rows,) = torch.nonzero(y[:, 0] > 0, as_tuple=True)
        return x.index_add(0, rows, torch.tanh(self.expert(y[rows])))


class Normalized(nn.Module):
    """Buffers are updated, and memory is laid out channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.back = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.view(-1, 4, 4, WIDTH // 16).contiguous(memory_format=torch.channels_last)
        return x + self.back(torch.relu(self.norm(self.conv(image)))).reshape(-1, WIDTH)


class Narrow(nn.Module):
    """In another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half() * 1.5).sin().float() + self.linear(x).bfloat16().relu().float()


KINDS = (Mlp, Mlp, Views, Routed, Normalized, Narrow)


class Net(nn.Module):
    """Random layers, some twice, with connections that skip some."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        layers = [draw.choice(KINDS)() for _ in range(draw.choice([3, 5, 8]))]
        if draw.random() < 0.3:
            layers[-1] = layers[0]
        self.layers = nn.ModuleList(layers)
        self.skipping = {place: draw.randrange(place) for place in range(1, len(layers)) if draw.random() < 0.2}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = []
        for place, layer in enumerate(self.layers):
            if place in self.skipping:
                x = x + read[self.skipping[place]].sin()
            read.append(x)
            x = layer(x)
        return x


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


class Steps:
    """Steps of one model on one batch in the same way, with other budgets."""

    def __init__(self, model: nn.Module, draw: random.Random) -> None:
        self.model = model.cuda()
        rows = draw.choice([2048, 2053, 1500])
        self.batch = torch.randn(rows, WIDTH).cuda(), torch.randn(rows, WIDTH).cuda()
        self.options: dict[str, Any] = {"tiling": "never", "stage_compiler": "eager", "dynamic": False}
        self.pipelined, self.outside = draw.random() < 0.7, True
        if self.pipelined:
            several = [["cuda:0", "cuda:1"], ["cuda:1", "cuda:0", "cuda:1"]]
            self.outside = draw.random() < 0.5
            self.options["num_microbatches"] = draw.choice([2, 4, 5])
            self.options["schedule"] = draw.choice(["gpipe", "1f1b", "interleaved", "zero_bubble", "roundpipe"])
            self.options["devices"] = draw.choice([None, *(several if torch.cuda.device_count() > 1 else [])])

    def __str__(self) -> str:
        layers = [type(layer).__name__ for layer in self.model.layers]
        return f"{layers}, {self.model.skipping}, {len(self.batch[0])} rows, {self.outside=}, {self.options}"

    def compare(self, step: Step, other: Step) -> None:
        # Which device RoundPipe's dispatch runs a stage on depends on what is recomputed, and so does where sums begin.
        (assert_close if self.options.get("schedule") == "roundpipe" else assert_bitwise)(step, other)

    def take(self, **budgets: Any) -> tuple[Step, roundpipe_fx.Plan, list[int]]:
        """The second step, the plan, and the most bytes on each device during that step."""
        torch._dynamo.reset()
        own = copy.deepcopy(self.model)
        compiled = roundpipe_fx.compile(own, **self.options, **budgets)
        x, y = self.batch
        for _ in range(2):
            own.zero_grad()
            gc.collect()
            torch.cuda.empty_cache()
            torch.manual_seed(0)
            with contextlib.ExitStack() as stack:
                peaks = [
                    stack.enter_context(roundpipe_fx.measure_peak(f"cuda:{device}"))
                    for device in range(torch.cuda.device_count())
                ]
                if self.outside:
                    loss = squares(compiled(x), y)
                    loss.backward()
                else:
                    loss = compiled.forward_backward(x, labels=y, loss_fn=squares)
        return left_behind(own, loss), compiled.plan, [peak.bytes for peak in peaks]

    def over(self, measured: list[int], budget: int) -> int:
        """Bytes that a device holds beyond the budget, which is that of each of its workers."""
        devices = self.options.get("devices") or ["cuda:0"]
        return max(peak - budget * devices.count(f"cuda:{number}") for number, peak in enumerate(measured))

    def least(self, **budgets: Any) -> int:
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            self.take(memory_budget=1, **budgets)
        return refused.value.minimum


@pytest.mark.parametrize("seeds", long_but([range(2, 4), range(4)], quick=[range(2, 4)]))
def test_the_host_changes_no_bit_and_no_tier_holds_more_than_it_may(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[weakref.ref[HostBuffers]] = []
    take = HostBuffers.take

    def taken(self: HostBuffers, size: int) -> torch.Tensor:
        if all(known() is not self for known in pools):
            pools.append(weakref.ref(self))
        return take(self, size)

    monkeypatch.setattr(HostBuffers, "take", taken)
    sent = 0
    for seed in seeds:
        torch.manual_seed(seed)
        draw = random.Random(seed)
        steps = Steps(Net(draw), draw)
        reference, _, measured = steps.take(memory_budget=1.0, host_budget=0)
        lowest, highest = steps.least(host_budget=0), max(measured)
        assert steps.least() <= lowest, str(steps)
        budget = int(lowest + draw.uniform(0, 0.5) * max(highest - lowest, 0))
        host_bytes = 0
        for share in (0.0, None, draw.random()):
            room = 2**30 if share is None else int(share * host_bytes)
            pools.clear()
            step, plan, measured = steps.take(memory_budget=budget, host_budget=room)
            steps.compare(step, reference)
            assert steps.over(measured, budget) <= 0, (str(steps), room, measured, budget)
            assert plan.host_bytes <= room, (str(steps), room, plan.host_bytes)
            if steps.pipelined:
                in_use = sum(known.bytes for pool in pools if (known := pool()) is not None)
                assert in_use <= plan.host_bytes, (str(steps), room)
            host_bytes = plan.host_bytes
            sent += host_bytes
    assert sent
