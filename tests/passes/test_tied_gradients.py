from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from roundpipe_fx.cost.roofline import DEVICES
from roundpipe_fx.joint_graph import JointGraph, Mark
from roundpipe_fx.passes.annotate import annotate
from roundpipe_fx.passes.segments import cut_segments
from roundpipe_fx.passes.stages import cut_stages
from roundpipe_fx.passes.tied_gradients import split_tied_gradients
from tests.capturing import capture_joint, example_inputs, run_joint

CPU = DEVICES["cpu"]


class Tied(nn.Module):
    """One matrix, used several times with another layer between."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.tied = nn.Linear(4, 4, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(uses))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(torch.tanh(self.tied(x))))
        return x.square().sum()


def _joint(model: nn.Module, stages: int = 0) -> JointGraph:
    """A captured graph; as many stages as can be if their number is not given."""
    joint, segments = cut_segments(annotate(capture_joint(model, torch.randn(3, 4)), CPU))
    return cut_stages(joint, segments, stages or len(segments), lambda size: 0.0)[0]


@pytest.mark.parametrize("stages", [0, 2, 3])
@pytest.mark.parametrize("uses", [2, 3, 5])
def test_each_stage_returns_what_it_adds(uses: int, stages: int) -> None:
    joint = _joint(Tied(uses), stages)
    inputs = example_inputs(joint)
    before = run_joint(joint, inputs)
    users = {node.meta[Mark.STAGE] for node in joint.primals[_tied(joint)].users}
    joint = split_tied_gradients(joint)
    after = run_joint(joint, inputs)
    first = joint.num_forward_outputs
    assert after[: len(before)][:first] == before[:first]
    assert joint.parts == (_tied(joint),) * (len(users) - 1)
    of_owner: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for node, owner, value in zip(joint.gradients, joint.gradient_owners, after[first:], strict=True):
        if value is None:
            assert before[first + owner] is None
        else:
            of_owner.setdefault(owner, []).append((node.meta[Mark.STAGE], value))
    for owner, parts in of_owner.items():
        assert len({stage for stage, _ in parts}) == len(parts)
        found = functools.reduce(torch.add, [value for _, value in parts])
        if owner == _tied(joint) and uses > 2:
            torch.testing.assert_close(found, before[first + owner])
        else:
            assert torch.equal(found, before[first + owner])
    assert {stage for stage, _ in of_owner[_tied(joint)]} == users


def _tied(joint: JointGraph) -> int:
    return next(number for number, node in enumerate(joint.primals) if "tied" in joint.label(node))


def test_what_is_cast_or_read_again_is_left_as_it_is() -> None:
    class Cast(Tied):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.tied.weight.to(torch.float64)
            for layer in self.layers:
                x = torch.tanh(layer(torch.tanh((x.double() @ weight).float())))
            return x.square().sum()

    joint = _joint(Cast(2))
    assert split_tied_gradients(joint).parts == ()
    assert split_tied_gradients(_joint(Tied(2), 1)).parts == ()
