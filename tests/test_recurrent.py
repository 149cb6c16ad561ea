"""Recurrent networks are compiled, with the bits that they have without oneDNN's operator for a whole layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import roundpipe_fx
from tests.comparison import assert_bitwise, train_step


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(8, 12, **options)
        width = options.get("proj_size", 12) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0]).square().mean()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"num_layers": 2, "dropout": 0.3}),
    ("LSTM", {"bidirectional": True, "batch_first": True, "proj_size": 5}),
    ("GRU", {"bidirectional": True}),
    ("RNN", {"nonlinearity": "relu", "bias": False}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind for kind, _ in KINDS])
def test_bits_and_bytes(kind: str, options: dict[str, Any]) -> None:
    model, batch = Recurrent(kind, **options), {"x": torch.randn(3, 3, 8)}
    with torch._dynamo.config.patch(allow_rnn=True), torch.backends.mkldnn.flags(enabled=False):
        theirs = copy.deepcopy(model)
        reference = train_step(torch.compile(theirs, backend="aot_eager"), theirs, batch)
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(model, memory_budget=0.0, fullgraph=True)
    assert_bitwise(train_step(compiled, model, batch), reference)
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(**batch).backward()
    assert peak.bytes <= compiled.plan.peak_bytes <= compiled.plan.budget
    assert not torch._dynamo.config.allow_rnn
    model.eval()
    with torch.no_grad():
        assert torch.allclose(compiled(**batch), model(**batch), rtol=1e-5, atol=1e-7)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 12)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.cells(pack_padded_sequence(x, lengths)).__getitem__(1)


class Disabled(nn.Linear):
    @torch.compiler.disable(reason="of a test")  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def test_plan_says_why_a_model_ran_eagerly() -> None:
    compiled = roundpipe_fx.compile(Packed(), memory_budget=0.5)
    x, lengths = torch.randn(5, 3, 8), torch.tensor([5, 4, 2])
    with pytest.warns(roundpipe_fx.GraphBreakWarning, match="breaks at"):
        compiled(x, lengths).sum().backward()
    with pytest.raises(RuntimeError, match=rf"ran eagerly, because Attempted to call .*{__file__}"):
        _ = compiled.plan
    for model, why in ((Disabled(8, 2), r"not to be compiled \(of a test\)"), (nn.Identity(), "computes nothing")):
        own = roundpipe_fx.compile(model)
        own(x)
        with pytest.raises(RuntimeError, match=why):
            _ = own.plan
