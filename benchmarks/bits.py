"""Loss and gradients beside ``torch.compile(backend="aot_eager")``: how many tensors differ in any bit.

python -m benchmarks.bits
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

import roundpipe_fx
from benchmarks.side_by_side import Case, build, cases, fresh, report, step
from roundpipe_fx.torch_private import dynamo_flags


def gradients(case: Case, recompute: str | None, autocast: bool) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step; ``recompute=None``: by aot_eager."""
    model = build(case)
    torch._dynamo.reset()
    with dynamo_flags() if recompute is None else contextlib.nullcontext():
        run: Any
        if recompute is None:
            run = torch.compile(model, backend="aot_eager")
        else:
            run = roundpipe_fx.compile(model, stages=4, recompute=recompute, fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = step(run, model, case.make_batch())
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": torch.tensor(loss), **found}


def main() -> None:
    rows = []
    for case in fresh(cases(layers=2, width=64, batch=2, length=32)):
        for autocast in (False, True):
            expected = gradients(case, None, autocast)
            row: dict[str, Any] = {
                "model": case.name,
                "autocast": "bf16" if autocast else "off",
                "tensors": len(expected),
            }
            for recompute in ("none", "full"):
                found = gradients(case, recompute, autocast)
                assert found.keys() == expected.keys()
                row[f"differ, recompute={recompute}"] = sum(not torch.equal(found[n], expected[n]) for n in expected)
            rows.append(row)
    report("bits", "loss and gradients that differ from aot_eager in any bit (target: 0)", rows)


if __name__ == "__main__":
    main()
