"""Host memory of an optimizer is part of plans, and refused before anything runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.pipeline.steps import Blocks, step_batch


@pytest.mark.usefixtures("on_the_host")
def test_the_plan_counts_the_optimizer_on_the_host_and_refuses_what_it_has_no_memory_for() -> None:
    batch, model = step_batch(), Blocks(depth=2).bfloat16()
    batch["x"] = batch["x"].bfloat16()
    weights = sum(parameter.nbytes for parameter in model.parameters())

    def compiled_with(host_budget: int | None) -> tuple[roundpipe_fx.CompiledModule, torch.optim.Optimizer]:
        compiled = roundpipe_fx.compile(
            copy.deepcopy(model),
            devices=["cpu"],
            num_microbatches=2,
            optim_dtype=torch.float32,
            host_budget=host_budget,
        )
        return compiled, torch.optim.AdamW(compiled.optim_parameters(), amsgrad=True)

    compiled, optimizer = compiled_with(None)
    compiled.forward_backward(**batch)
    without = compiled.plan.host_bytes
    compiled.forward_backward(**batch, optimizer=optimizer)
    copies = [*compiled.optim_parameters()]
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    expected = sum(value.nbytes for value in (*copies, *states)) + max(value.nbytes for value in copies)
    plan = compiled.plan
    assert plan.host_bytes - without == plan.pipeline.host_optimizer_bytes == expected == 8 * weights + 4 * 16 * 32
    assert "; optimizer " in str(plan)
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    compiled.forward_backward(**batch, optimizer=optimizer)  # what has been allocated is counted as it is
    assert compiled.plan.host_bytes == plan.host_bytes + steps

    other, unknown = compiled_with(plan.host_bytes - 1)
    for refused in (
        lambda: other.forward_backward(**batch, optimizer=unknown),
        lambda: other.trace(**batch, optimizer=unknown),
        lambda: (other.forward_backward(**batch), other.step(unknown)),
    ):
        with pytest.raises(roundpipe_fx.HostMemoryError, match="for the optimizer's state and copies") as raised:
            refused()
        assert raised.value.needed == plan.host_bytes and not unknown.state
    enough, known = compiled_with(plan.host_bytes)
    assert enough.trace(**batch, optimizer=known).host_bytes == plan.host_bytes
    enough.forward_backward(**batch, optimizer=known)


def test_a_plan_without_memory_counts_an_optimizer_without_memory() -> None:
    with torch.device("meta"):
        model = Blocks(depth=2)
        copies = [nn.Parameter(parameter.double()) for parameter in model.parameters()]
    weights = sum(parameter.nbytes for parameter in model.parameters())

    def host_bytes(optimizer: torch.optim.Optimizer | None) -> int:
        given = {"device": "RTX 4090", "offloaded": True, "memory_budget": 1.0, "num_microbatches": 1}
        summed = _Summed(model)
        return roundpipe_fx.plan(summed, torch.empty(4, 16), optimizer=optimizer, **given).host_bytes

    without = host_bytes(None)
    assert host_bytes(torch.optim.AdamW(model.parameters(), fused=True)) == without + 2 * weights
    assert host_bytes(torch.optim.SGD(model.parameters())) == without
    assert host_bytes(torch.optim.SGD(copies, momentum=0.9)) == without + 4 * weights + 8 * 16 * 32


class _Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sum()
