"""Seconds of a step with ``recompute="none"`` beside ``backend="aot_eager"``: median ratio of paired runs.

python -m benchmarks.step_time
"""

from __future__ import annotations

import torch

import roundpipe_fx
from benchmarks.side_by_side import build, cases, fresh, paired_ratio, report, step
from roundpipe_fx.torch_private import dynamo_flags


def main() -> None:
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


if __name__ == "__main__":
    main()
