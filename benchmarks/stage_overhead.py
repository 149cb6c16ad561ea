"""Host time of a step that is divided into many stages, beside the same step in one piece by ``torch.compile``.

python -m benchmarks.stage_overhead

A decoder of 12 layers at batch 1, so small that its kernels take hardly any time: what is left is what the host does in
front of a device. Ours have a stage a layer, and run them eagerly and by Inductor, which also compiles the model as one
stage; the peers are ``aot_eager`` and ``torch.compile``'s default. One thread, microseconds of the processor, medians
over rounds in which all take turns.

A second table counts what Inductor's code calls in a step, in one piece and in stages. Buffers, views and checks of
sizes are timed alone too: *of the step* is what the additional ones take, beside the step in one piece.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
import timeit
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import roundpipe_fx
from benchmarks.processes import Block
from benchmarks.side_by_side import give_own_code, paired, report

_WIDTH, _LENGTH, _LAYERS = 16, 4, 12
_ROUNDS = 300

_PAIRS: dict[str, tuple[str, Callable[[nn.Module], Callable[..., torch.Tensor]]]] = {
    "aot_eager": ("aot_eager", lambda model: torch.compile(model, backend="aot_eager")),
    "eager stages": ("aot_eager", lambda model: _compiled(model, "eager", None)),
    "eager stages, all recomputed": ("aot_eager", lambda model: _compiled(model, "eager", "full")),
    "torch.compile": ("torch.compile", torch.compile),
    "Inductor's stages": ("torch.compile", lambda model: _compiled(model, "inductor", None)),
    "one stage of Inductor": ("torch.compile", lambda model: _compiled(model, "inductor", None, stages=1)),
}
"""By way: the peer that it is compared with, and what compiles the model."""


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(_WIDTH) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def decoder() -> nn.Module:
    """A model with a code object of its own."""
    torch.manual_seed(0)
    model = _Decoder()
    give_own_code(model)
    return model


def _compiled(
    model: nn.Module, compiler: str, recompute: str | None, stages: int = _LAYERS
) -> roundpipe_fx.CompiledModule:
    return roundpipe_fx.compile(model, stages=stages, stage_compiler=compiler, recompute=recompute)


def main() -> None:
    torch.set_num_threads(1)
    report("stage_overhead", "a step of 12 small layers, one thread (target: ratio at most 1)", measured(_ROUNDS))
    report("stage_calls", "calls in a step of 12 small layers, in one piece and in stages", counted())


def measured(rounds: int) -> list[dict[str, float | str]]:
    """A row a way."""
    clocks = {way: _clock(compiled(decoder())) for way, (_, compiled) in _PAIRS.items()}
    seconds = paired(clocks, rounds, warm_up=10)
    rows: list[dict[str, float | str]] = []
    for way, (peer, _) in _PAIRS.items():
        low, median, high = statistics.quantiles([took[way] / took[peer] for took in seconds], n=4)
        rows.append(
            {
                "way": way,
                "CPU us a step": 1e6 * statistics.median(took[way] for took in seconds),
                "peer": peer,
                "ratio": median,
                "quartiles": f"{low:.3f} {high:.3f}",
            }
        )
    return rows


_CALLS = {
    "kernel": "kernels",
    "_empty_strided_cpu": "buffers",
    "_reinterpret_tensor": "views",
    "assert_size_stride": "checks of sizes",
}
"""By name of a function that Inductor's code calls, what it is in the table."""


def counted() -> list[dict[str, float | str]]:
    """A row a kind of call."""
    functions: dict[str, Callable[..., Any]] = {}
    whole, divided = (_PAIRS[way][1](decoder()) for way in ("torch.compile", "Inductor's stages"))
    one, ours = _calls(whole, functions), _calls(divided, functions)
    clock = _clock(whole)
    step = min(clock() for _ in range(_ROUNDS))
    x = torch.ones(4, _WIDTH)
    operands: dict[str, tuple[Any, ...]] = {
        "_empty_strided_cpu": ((4, _WIDTH), (_WIDTH, 1), torch.float32),
        "_reinterpret_tensor": (x, (_WIDTH, 4), (1, _WIDTH), 0),
        "assert_size_stride": (x, (4, _WIDTH), (_WIDTH, 1)),
    }
    rows: list[dict[str, float | str]] = []
    for name, kind in [*_CALLS.items(), ("other", "other functions in C++"), ("python", "Python functions")]:
        more = ours[name] - one[name]
        share: float | str = ""
        if name in operands:
            call = functools.partial(functions[name], *operands[name])
            share = more * min(timeit.repeat(call, timer=time.process_time, number=2000, repeat=50)) / 2000 / step
        rows.append(
            {"calls": kind, "in one piece": one[name], "in stages": ours[name], "more": more, "of the step": share}
        )
    return rows


def _calls(model: Callable[..., torch.Tensor], functions: dict[str, Callable[..., Any]]) -> Counter[str]:
    """Numbers of calls in a step, by name.

    Args:
        model: compiled.
        functions: the called functions, by name; extended.
    """
    counts: Counter[str] = Counter()

    def count(_: types.FrameType, event: str, function: Any) -> None:
        if event == "call":
            counts["python"] += 1
        elif event == "c_call":
            name = getattr(function, "__name__", "")
            counts[name if name in _CALLS else "other"] += 1
            functions[name] = function

    x = torch.ones(1, _LENGTH, _WIDTH)
    # The backward runs in this thread, where it is counted.
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(5):
            model(x).backward()
        sys.setprofile(count)
        try:
            model(x).backward()
        finally:
            sys.setprofile(None)
    return counts


def _clock(model: Callable[..., torch.Tensor]) -> Callable[[], float]:
    x = torch.ones(1, _LENGTH, _WIDTH)

    def clock() -> float:
        begin = time.process_time()
        model(x).backward()
        return time.process_time() - begin

    return clock


if __name__ == "__main__":
    main()
