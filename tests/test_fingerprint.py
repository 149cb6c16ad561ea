from __future__ import annotations

import torch
from torch import nn

from roundpipe_fx.fingerprint import fingerprint
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


def test_unknown_sizes_are_alike_and_their_relation_matters() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum()

    x = torch.randn(4, requires_grad=True)
    assert _digest(one, x) == _digest(one, x.detach().clone().requires_grad_())
    assert _digest(one, x) != _digest(lambda x: x[x > 0].sum() + x[x < 0].sum(), x)
