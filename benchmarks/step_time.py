"""Seconds of a step with ``recompute="none"``, and microseconds of a tiny one, beside ``backend="aot_eager"``.

python -m benchmarks.step_time

Both are median ratios of paired runs. The tiny model's kernels take hardly any time, so its step shows what a compiled
model costs in itself; it runs on one thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import nn

import roundpipe_fx
from benchmarks.side_by_side import build, cases, fresh, give_own_code, paired, paired_ratio, report, seconds_of, step
from roundpipe_fx.torch_private import dynamo_flags

_WIDTH = 16
_ROUNDS = 3000


def main() -> None:
    step_time()
    step_overhead()


def step_time() -> None:
    rows = []
    chosen = [case for case in cases(layers=8, width=256, batch=4, length=128) if case.name in ("GPT-2", "BERT")]
    for case in fresh(chosen):
        batch = case.make_batch()
        ours, theirs = build(case), build(case)
        compiled = roundpipe_fx.compile(ours, stages=4, recompute="none", fullgraph=True)
        step(compiled, ours, batch)
        with dynamo_flags():
            peer = torch.compile(theirs, backend="aot_eager")
            step(peer, theirs, batch)
        ratio, mine, reference = paired_ratio(
            lambda: step(compiled, ours, batch),  # noqa: B023 - run before the next case
            lambda: step(peer, theirs, batch),  # noqa: B023
            pairs=30,
            warm_up=5,
        )
        rows.append({"model": case.name, "recompute=none s": mine, "aot_eager s": reference, "median ratio": ratio})
    report("step_time", "seconds a step, 4 stages, recompute=none (target: ratio at most 1.05)", rows)


def step_overhead() -> None:
    options = {"memory_budget": 0.5}
    aot_eager = 'torch.compile(backend="aot_eager")'
    models = {
        "eager": _tiny(),
        aot_eager: torch.compile(_tiny(), backend="aot_eager"),
        "roundpipe_fx.compile": roundpipe_fx.compile(_tiny()),
        "roundpipe_fx.compile, with a budget": roundpipe_fx.compile(_tiny(), **options),
        'torch.compile(backend="roundpipe_fx")': torch.compile(_tiny(), backend="roundpipe_fx"),
        'torch.compile(backend="roundpipe_fx"), with a budget': torch.compile(
            _tiny(), backend="roundpipe_fx", options=options
        ),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rounds = paired({name: _clock(model) for name, model in models.items()}, _ROUNDS, warm_up=20)
    torch.set_num_threads(threads)
    rows = []
    for name in models:
        ratios = [took[name] / took[aot_eager] for took in rounds]
        low, median, high = statistics.quantiles(ratios, n=4)
        microseconds = 1e6 * statistics.median(took[name] for took in rounds)
        row = {
            "way": name,
            "us a step": microseconds,
            "ratio to aot_eager": median,
            "quartiles": f"{low:.3f} {high:.3f}",
        }
        rows.append(row)
    report("step_overhead", "a step of a tiny MLP, one thread (target: ratio at most 1)", rows)


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.sum()


def _tiny() -> nn.Module:
    """A model with a code object of its own."""
    model = _Tiny()
    give_own_code(model)
    return model


def _clock(model: Callable[..., torch.Tensor]) -> Callable[[], float]:
    x = torch.ones(8, _WIDTH)
    return lambda: seconds_of(lambda: model(x).backward())


if __name__ == "__main__":
    main()
