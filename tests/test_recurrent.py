"""Recurrent networks are compiled, with the bits that they have without oneDNN's operator for a whole layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import roundpipe_fx
from tests.comparison import assert_bitwise, train_step
from tests.counting import count_operations


class Recurrent(nn.Module):
    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(8, 12, **options)
        width = options.get("proj_size", 12) * (2 if options.get("bidirectional") else 1)
        self.out = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cells(x)[0]).square().mean()


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"num_layers": 2}),
    ("LSTM", {"bidirectional": True, "batch_first": True, "proj_size": 5}),
    ("GRU", {"bidirectional": True}),
    ("RNN", {"nonlinearity": "relu", "bias": False}),
]


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"batch_first": True, "proj_size": 5}),
        ("GRU", {"bidirectional": True}),
        ("RNN", {"batch_first": True, "bidirectional": True, "bias": False}),
    ],
    ids=["LSTM", "GRU", "RNN"],
)
@pytest.mark.long
def test_dropout_between_layers_has_the_masks_of_eager(kind: str, options: dict[str, Any]) -> None:
    model = Recurrent(kind, num_layers=3, dropout=0.5, **options).double()
    batch = {"x": torch.randn(3, 4, 8, dtype=torch.float64)}
    compiled = roundpipe_fx.compile(model, memory_budget=0.0, fullgraph=True)
    step = train_step(compiled, model, batch)
    state = torch.get_rng_state()
    reference = train_step(model, model, batch)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(vars(step), vars(reference), rtol=1e-12, atol=1e-14)
    model.eval()
    torch.testing.assert_close(compiled(**batch), model(**batch), rtol=1e-12, atol=0)


class Packed(nn.Module):
    """A recurrent network on packed sequences, and what users do with its results."""

    def __init__(self, kind: str, total_length: int | None, enforce_sorted: bool, **options: Any) -> None:
        super().__init__()
        self.cells = getattr(nn, kind)(8, 12, **options)
        width = options.get("proj_size", 12) * (2 if options.get("bidirectional") else 1)
        self.into, self.out = nn.Linear(8, 8), nn.Linear(width, 4)
        self.options = {"batch_first": options.get("batch_first", False)}
        self.enforce_sorted, self.total_length = enforce_sorted, total_length

    def forward(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        packed = pack_padded_sequence(self.into(x), lengths, enforce_sorted=self.enforce_sorted, **self.options)
        cells, hidden = self.cells(packed)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        padded, lengths = pad_packed_sequence(cells, total_length=self.total_length, **self.options)
        scores = self.out(padded).sum() + (padded * padded).sum()
        return scores + (hidden.sum((0, 2)) * lengths).sum()


PACKED: list[tuple[str, float, int | None, list[Any], dict[str, Any]]] = [
    (
        "LSTM",
        0.2,
        9,
        [torch.tensor([5, 4, 2]), torch.tensor([3, 3, 1])],
        {"num_layers": 3, "dropout": 0.3, "proj_size": 5},
    ),
    ("GRU", 0.0, None, [torch.tensor([2, 5, 2]), torch.tensor([1, 1, 1])], {"num_layers": 2, "bidirectional": True}),
    ("RNN", 0.2, None, [[4, 5, 1], [2, 3, 3]], {"bias": False, "batch_first": True}),
]


@pytest.mark.parametrize("case", PACKED, ids=[kind for kind, *_ in PACKED])
def test_packed_sequences(case: tuple[str, float, int | None, list[Any], dict[str, Any]]) -> None:
    kind, memory_budget, total_length, lengths, options = case
    model = Packed(kind, total_length, kind == "LSTM", **options)
    x = torch.randn(3, 5, 8) if options.get("batch_first") else torch.randn(5, 3, 8)
    compiled = roundpipe_fx.compile(model, memory_budget=memory_budget, fullgraph=True)
    for given in (*lengths, lengths[0]):
        batch = {"x": x, "lengths": given}
        assert_bitwise(train_step(compiled, model, batch), train_step(model, model, batch))
    model.zero_grad()
    with roundpipe_fx.measure_peak("cpu") as peak:
        compiled(x, lengths[0]).backward()
    assert peak.bytes <= compiled.plan.peak_bytes <= compiled.plan.budget


def test_sums_of_packed_gradients_have_the_order_of_eager() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.cells = nn.Linear(8, 8), nn.GRU(8, 4, bidirectional=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(self.into(x), lengths, enforce_sorted=False)
            once = self.cells(packed)[0]
            twice = self.cells(once._replace(data=once.data + packed.data))[0].data.sin()
            return (twice + packed.data).square().sum() + sum(p.square().sum() for p in self.cells.parameters())

    model, batch = Twice(), {"x": torch.randn(7, 3, 8), "lengths": torch.tensor([4, 7, 2])}
    compiled = roundpipe_fx.compile(model, memory_budget=0.2, fullgraph=True)
    assert_bitwise(train_step(compiled, model, batch), train_step(model, model, batch))


def test_sequences_are_packed_once_a_step() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList(nn.GRU(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
            for cells in self.cells:
                x = x + pad_packed_sequence(cells(pack_padded_sequence(x.sin(), lengths))[0], total_length=5)[0]
            return x.sum()

    compiled = roundpipe_fx.compile(Several(), memory_budget=0.0, fullgraph=True)
    x, lengths = torch.randn(5, 3, 8), torch.tensor([5, 4, 2])
    compiled(x, lengths).backward()
    compiled(x, lengths).backward()
    with count_operations() as ran:
        compiled(x, lengths).backward()
    operators = torch.ops.roundpipe_fx
    assert ran[operators.pack.default] == 3
    assert ran[operators.recur.default] > 3, "it recomputes nothing"


def test_errors_on_packed_sequences() -> None:
    model = Packed("GRU", 4, True)
    compiled = roundpipe_fx.compile(model, fullgraph=True)
    x = torch.randn(5, 3, 8)
    for lengths, why in (([5, 4, 3], "at least the length of the longest"), ([2, 3, 1], "sorted in decreasing order")):
        for called in (model, compiled):
            with pytest.raises((ValueError, RuntimeError), match=why):
                called(x, torch.tensor(lengths))


def test_others_trace_packed_sequences_as_before() -> None:
    model, x, lengths = Packed("GRU", None, True), torch.randn(5, 3, 8), torch.tensor([5, 4, 2])
    roundpipe_fx.compile(model, fullgraph=True)(x, lengths)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pack_padded_sequence"):
        torch.compile(model, backend="eager", fullgraph=True)(x, lengths)


class Untraceable(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            torch.set_rng_state(torch.get_rng_state())
        return super().forward(input)


class Disabled(nn.Linear):
    @torch.compiler.disable(reason="of a test")  # type: ignore[untyped-decorator]
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


def test_plan_says_why_a_model_ran_eagerly() -> None:
    compiled = roundpipe_fx.compile(Untraceable(8, 2), memory_budget=0.5)
    x = torch.randn(5, 3, 8)
    with pytest.warns(roundpipe_fx.GraphBreakWarning, match="breaks at"):
        compiled(x).sum().backward()
    with pytest.raises(RuntimeError, match=rf"ran eagerly, because Attempted to call .*{__file__}"):
        _ = compiled.plan
    for model, why in ((Disabled(8, 2), r"not to be compiled \(of a test\)"), (nn.Identity(), "computes nothing")):
        own = roundpipe_fx.compile(model)
        own(x)
        with pytest.raises(RuntimeError, match=why):
            _ = own.plan
