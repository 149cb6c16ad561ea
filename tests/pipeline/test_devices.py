"""What can be told of several devices without having them."""

from __future__ import annotations

import torch
from torch import nn

import roundpipe_fx
from roundpipe_fx.codegen import moved
from roundpipe_fx.ir.joint_graph import Phase
from tests.pipeline.steps import CPUS


class Masked(nn.Module):
    """Makes a table out of nothing, on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(8, device=x.device) % 2 == 0
        return torch.where(mask, self.linear(x), torch.zeros(8, device=x.device)).square().sum()


def test_a_stage_module_moves_to_another_device() -> None:
    meta = torch.device("meta")
    compiled = roundpipe_fx.compile(Masked(), stages=1, recompute="full")
    compiled(torch.randn(4, 8)).backward()
    for module in compiled.plan.modules:
        own = moved(module.module, meta)
        values = [node.meta["val"] for node in own.graph.find_nodes(op="placeholder")]
        inputs = [torch.empty(value.shape, dtype=value.dtype, device=meta) for value in values]
        results = own(inputs)
        assert results and all(value.device == meta for value in results)
        assert {node.meta["val"].device for node in own.graph.nodes if node.op != "output"} == {meta}
        assert all(node.meta["val"].device.type == "cpu" for node in module.module.graph.nodes if node.op != "output")
    assert {module.phase for module in compiled.plan.modules} >= {Phase.FORWARD, Phase.BACKWARD}


def test_the_model_stays_where_it_is() -> None:
    model = Masked()
    parameters = list(model.parameters())
    compiled = roundpipe_fx.compile(model, devices=CPUS, num_microbatches=2)
    compiled.forward_backward(torch.randn(4, 8))
    assert all(own is before for own, before in zip(compiled.parameters(), parameters, strict=True))
    assert all(parameter.grad is not None and parameter.grad.device == parameter.device for parameter in parameters)
