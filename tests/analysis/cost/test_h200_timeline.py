"""Modelled seconds beside measured ones: a step on one H200, whose timeline is in h200_timeline.json.

The model has 28 layers of the shape of Qwen3-1.7B's, and lies on the host: Inductor's stages on 4 microbatches of 2 ×
2,048 tokens in bfloat16, with RoundPipe's schedule. The file is what ``plan.timeline().write(path)`` wrote then, with
what was predicted and measured; the whole step took 0.415 s. Halves of layers are told from each other by their bytes.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import roundpipe_fx
from roundpipe_fx.analysis.cost import DEVICES
from roundpipe_fx.ir.options import Options
from roundpipe_fx.schedules import ActionKind, Schedule, StepCosts, simulate_time
from roundpipe_fx.schedules.action import StageAction
from roundpipe_fx.schedules.stage_graph import slot_chain

WIDTH, INNER, HEADS, GROUPS, HEAD, WORDS = 2048, 6144, 16, 8, 128, 151936
MEASURED_SECONDS = 0.415
EVENTS = json.loads(Path(__file__).with_name("h200_timeline.json").read_text())["traceEvents"]


class AttentionHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.queries = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.keys = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.values = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal, (rows, tokens, _) = self.norm(x), x.shape
        queries, keys, values = (
            part(normal).view(rows, tokens, -1, HEAD).transpose(1, 2) for part in (self.queries, self.keys, self.values)
        )
        keys, values = (part.repeat_interleave(HEADS // GROUPS, 1) for part in (keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))


class MLPHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = self.norm(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.attention, self.mlp = AttentionHalf(), MLPHalf()
        self.head = nn.Sequential(nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, WORDS, bias=False))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.mlp(self.attention(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


PARTS = ("embedding", "attention", "mlp", "head")


@dataclass(frozen=True)
class Part:
    """A quarter of :class:`Model`: bytes of its weights, and modelled seconds of a microbatch."""

    bytes: int
    forward: float
    backward: float


@pytest.fixture(scope="module")
def parts() -> dict[str, Part]:
    """Modelled with the H200's table."""
    with pytest.MonkeyPatch.context() as patch:
        # plan() plans for eager stages; these were Inductor's.
        parse = Options.parse
        patch.setattr(Options, "parse", lambda values: parse({**values, "stage_compiler": "inductor"}))
        patch.setenv("ROUNDPIPE_FX_PLAN_CACHE", "0")
        with torch.device("meta"):
            model = Model().bfloat16()
            tokens = torch.empty(8, 2048, dtype=torch.long)
        plan = roundpipe_fx.plan(
            model, tokens, tokens, device="H200", stages=list(PARTS[1:]), num_microbatches=4, schedule="gpipe"
        )
    assert len(plan.stages) == len(PARTS)
    return {
        name: Part(
            sum(weight.nbytes for weight in model.get_submodule(name).parameters()),
            stage.forward_seconds,
            stage.backward_seconds,
        )
        for name, stage in zip(PARTS, plan.stages, strict=True)
    }


def actions(process: int) -> list[dict[str, Any]]:
    """Actions of the step, predicted (0) or measured (1), in order."""
    found = [event for event in EVENTS if event["pid"] == process and event.get("cat") in ("forward", "backward")]
    return sorted(found, key=lambda event: event["ts"])


def contents(parts: dict[str, Part]) -> dict[StageAction, dict[str, int]]:
    """Count the parts of each stage, from the bytes that a forward reads and the gradients that a backward returns."""
    found: dict[StageAction, dict[str, int]] = {}
    for event in EVENTS:
        if "bytes" not in event.get("args", {}):
            continue
        what, _, action = event["name"].rpartition(" ")
        stage = int(action[1:].split(".")[0])
        if what == "weights for" and action.startswith("F"):
            step = ActionKind.FORWARD, stage
        elif what == "gradients after":
            step = ActionKind.BACKWARD, stage
        else:
            continue
        whole = "head" if stage == 6 else "embedding" if stage in (0, 10) else None
        left = event["args"]["bytes"] - (parts[whole].bytes if whole else 0)
        halves = min(
            ({"attention": attentions, "mlp": mlps} for attentions in range(10) for mlps in range(10)),
            key=lambda counts: abs(left - sum(parts[name].bytes * count for name, count in counts.items())),
        )
        found[step] = {**halves, **({whole: 1} if whole else {})}
    return found


def modelled(parts: dict[str, Part]) -> dict[StageAction, float]:
    """Seconds of each stage action."""
    return {
        step: sum(
            count * (parts[name].forward if step[0] is ActionKind.FORWARD else parts[name].backward)
            for name, count in counts.items()
        )
        for step, counts in contents(parts).items()
    }


def test_all_layers_are_in_the_stages(parts: dict[str, Part]) -> None:
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        of_kind = [counts for (own, _), counts in contents(parts).items() if own is kind]
        total = {name: sum(counts.get(name, 0) for counts in of_kind) for name in PARTS}
        assert total == {"embedding": 1, "attention": 28, "mlp": 28, "head": 1}


def test_stages_are_modelled_as_they_were_measured(parts: dict[str, Part]) -> None:
    measured: dict[str, list[float]] = {}
    for event in actions(1):
        measured.setdefault(event["name"].split(".")[0], []).append(event["dur"] * 1e-6)
    seconds = {f"{kind}{stage}": value for (kind, stage), value in modelled(parts).items()}
    off = {name: seconds[name] / statistics.mean(runs) - 1 for name, runs in measured.items()}
    print({name: f"{share:+.1%}" for name, share in off.items()})
    assert all(abs(share) <= 0.15 for share in off.values()), off


def test_the_step_is_modelled_as_it_was_measured(parts: dict[str, Part]) -> None:
    held = contents(parts)
    numbers: dict[StageAction, dict[int, int]] = {}
    position = {"embedding": 0, "attention": 0, "mlp": 0, "head": 0}
    code = {name: 1000 * place for place, name in enumerate(PARTS)}
    for kind in (ActionKind.FORWARD, ActionKind.BACKWARD):
        forward = kind is ActionKind.FORWARD
        position = dict.fromkeys(PARTS, 0)
        for (_, stage), counts in sorted((item for item in held.items() if item[0][0] is kind), key=lambda i: i[0][1]):
            taken: dict[int, int] = {}
            for name, count in counts.items():
                total = 28 if name in ("attention", "mlp") else 1
                for number in range(position[name], position[name] + count):
                    taken[code[name] + (number if forward else total - 1 - number)] = parts[name].bytes
                position[name] += count
            numbers[kind, stage] = taken
    graph = slot_chain(6, 11)
    schedule = Schedule.parse("0: " + " ".join(event["name"] for event in actions(0)), "roundpipe")
    costs = StepCosts(
        seconds=modelled(parts),
        copied_bytes=numbers,
        base_bytes={step: read for step, read in numbers.items() if step[0] is ActionKind.BACKWARD},
        on_host=frozenset(number for read in numbers.values() for number in read),
        host_bandwidth=DEVICES["H200"].host,
        both_ways=DEVICES["H200"].both_ways,
    )
    makespan = simulate_time(schedule, graph, costs).makespan
    print(f"{makespan:.3f} s modelled, {MEASURED_SECONDS} s measured")
    assert makespan == pytest.approx(MEASURED_SECONDS, rel=0.10)
