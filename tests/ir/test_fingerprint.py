from __future__ import annotations

import torch
from torch import nn

from roundpipe_fx.ir.fingerprint import fingerprint
from tests.capturing import capture_joint


def _digest(model, *inputs: torch.Tensor) -> str:
    joint = capture_joint(model, *inputs)
    return fingerprint(joint.computed(), [*joint.outputs], joint.inputs)


def test_names_do_not_matter_and_structure_does() -> None:
    x = torch.randn(2, 4)
    base = _digest(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), x)
    assert base == _digest(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    assert base != _digest(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), x)
    assert base != _digest(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4))
    assert base != _digest(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double(), x.double())
    assert base != _digest(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 2).t())
    assert base != _digest(nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh()), x.requires_grad_())


def test_constants_matter() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    assert _digest(lambda x: (x * 2).sum(), x) != _digest(lambda x: (x * 3).sum(), x)


def test_unknown_sizes_are_numbered_not_named() -> None:
    """Two experts of one graph, whose token counts are different unknowns, are alike."""

    class TwoAlike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(part(x[x[:, index] > 0]).sum() for index, part in enumerate(self.parts))

    joint = capture_joint(TwoAlike(), torch.randn(6, 4))
    products = [node for node in joint.computed() if node.target is torch.ops.aten.addmm.default]
    first, second = products[:2]
    assert str(first.meta["val"].shape[0]) != str(second.meta["val"].shape[0])
    assert fingerprint([first], [first]) == fingerprint([second], [second])
    assert fingerprint([first], [first]) != fingerprint([first, second], [first, second])
