"""``Checkpointable``: sequences that train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import roundpipe_fx
from roundpipe_fx.compat.rotor import Checkpointable, ForwardCheck, ForwardEnable, ForwardNograd
from roundpipe_fx.report.peak_memory import measure_peak
from tests.counting import count_operations
from tests.long import long_but

WIDTH = 32


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))


def sequential(depth: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer() for _ in range(depth)))


class Residual(nn.Module):
    """No ``nn.Sequential``: residuals, and a value that skips over all layers."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = sequential(depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for module in self.layers:
            y = y + module(y)
        return y * x


X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(3))


def step(run: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, list[torch.Tensor]]:
    run.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    with measure_peak("cpu") as peak:
        out = run(*args, **kwargs)
        loss = out.square().mean() if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
    return peak.bytes, [p.grad.clone() for p in run.parameters()]


def assert_same(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", long_but([sequential, Residual], quick=[sequential]))
def test_within_the_limit_with_the_same_bits(make: Any) -> None:
    model = make()
    plain, reference = step(model, X)
    wrapped = Checkpointable(model)
    wrapped.measure(X)
    lengths = []
    for share in (1.1, 0.6, 0.45, 0.35):
        limit = int(share * plain)
        sequence = wrapped.compute_sequence(limit)
        lengths.append(len(sequence))
        peak, gradients = step(wrapped, X)
        assert_same(gradients, reference)
        assert peak <= limit
        assert sequence.peak(wrapped.chain) <= limit
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    with pytest.raises(ValueError, match=r"fits|be met"):
        wrapped.compute_sequence(plain // 50)


@pytest.mark.parametrize("make", long_but([sequential, Residual], quick=[sequential]))
def test_baselines_run(make: Any) -> None:
    model = make()
    plain, reference = step(model, X)
    wrapped = Checkpointable(model)
    wrapped.measure(X)
    peaks = {}
    for algo in ("no-checkpoint", "every-segment", "periodic"):
        wrapped.compute_sequence(10 * plain, algo=algo)
        peaks[algo], gradients = step(wrapped, X)
        assert_same(gradients, reference)
    assert peaks["every-segment"] < peaks["periodic"] < peaks["no-checkpoint"] <= plain


def test_layers_run_as_the_sequence_says() -> None:
    model = sequential(6)
    wrapped = Checkpointable(model)
    wrapped.measure(X)
    for algo in ("no-checkpoint", "every-segment", "periodic"):
        sequence = wrapped.compute_sequence(1 << 30, algo=algo)
        forwards = sum(isinstance(o, (ForwardEnable, ForwardCheck)) for o in sequence)
        forwards += sum(isinstance(o, ForwardNograd) for o in sequence)
        with count_operations() as ran:
            step(wrapped, X)
        assert ran[torch.ops.aten.gelu.default] == forwards


def test_compiled() -> None:
    """Traced, a sequence of an ``nn.Sequential`` is checkpoints inside of checkpoints; the bits are the same."""
    model = sequential()
    plain, reference = step(model, X)
    wrapped = Checkpointable(model, X, mem_limit=int(0.35 * plain))
    assert wrapped.sequence is not None and len(wrapped.sequence) > 2 * 8 + 1
    eager, _ = step(wrapped, X)
    compiled = roundpipe_fx.compile(wrapped, fullgraph=True)
    peak, gradients = step(compiled, X)
    assert_same(gradients, reference)
    assert compiled.plan.recompute_seconds > 0.3 * compiled.plan.forward_seconds
    assert peak <= eager


def test_measuring_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 4))
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    wrapped = Checkpointable(model)
    wrapped.measure(X)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    chain = wrapped.build_chain()
    assert chain.boundary == (4 * 256 * WIDTH,) * 4 + (4 * 256 * 4,)
    assert chain.saved[3] == 2 * 4 * 256 * WIDTH  # what a dropout made, and its noise
    assert list(wrapped.state_dict()) == [f"model.{name}" for name in before]


def test_copies() -> None:
    model = Residual(3)
    plain, reference = step(model, X)
    wrapped = Checkpointable(model, X, mem_limit=int(0.7 * plain))
    step(wrapped, X)
    assert list(wrapped.state_dict()) == [f"model.{name}" for name in model.state_dict()]
    twin = copy.deepcopy(wrapped)
    peak, gradients = step(twin, X)
    assert_same(gradients, reference)
    assert peak <= 0.7 * plain and next(twin.parameters()) is not next(model.parameters())
    with pytest.raises(ValueError, match="since it was copied"):
        twin.compute_sequence(plain)


def test_defaults_and_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    model = sequential(3)
    wrapped = Checkpointable(model, X, verbosity=2)
    sequence = wrapped.compute_sequence()  # 90 % of the free memory
    assert list(sequence) == list(Checkpointable(model, X).compute_sequence(1 << 34, algo="no-checkpoint"))
    printed = capsys.readouterr().err
    assert "forward tmp" in printed and "7 operations (persistent" in printed
    peak = sequence.peak(wrapped.chain)
    limit = int(1.05 * peak)  # memory is counted in slots, rounded up
    assert len(Checkpointable(model, X, mem_limit=limit).sequence) == 7
    heavy = Checkpointable(model, X, mem_limit=limit, loss_tmp_memory_usage=peak // 4)
    assert len(heavy.sequence) > 7
    assert heavy.chain.backward_temporary[-1] == peak // 4


def test_without_training_it_runs_as_it_is() -> None:
    model = sequential(3).eval()
    wrapped = Checkpointable(model).eval()
    assert torch.equal(wrapped(X), model(X))
    with torch.no_grad():
        torch.manual_seed(0)
        found = wrapped.train()(X)  # no sequence is asked for
        torch.manual_seed(0)
        assert torch.equal(found, model.train()(X))


def test_misuse() -> None:
    wrapped = Checkpointable(sequential(2))
    with pytest.raises(ValueError, match="nothing was measured"):
        wrapped.build_chain(1 << 20)
    with pytest.raises(ValueError, match="nothing was measured"):
        wrapped.compute_sequence(1 << 20)
    with pytest.raises(ValueError, match="there is no sequence"):
        wrapped(X)
    with pytest.raises(ValueError, match="valid values are 'persistent'"):
        wrapped.compute_sequence(1 << 20, algo="magic")
    measured = Checkpointable(sequential(2), X)
    with pytest.raises(ValueError, match="0 bytes is not positive"):
        measured.compute_sequence(0)
    with pytest.raises(TypeError, match="takes one positional input"):
        measured.compute_sequence(1 << 30)
        measured(X, X)
    with pytest.raises(ValueError, match="fits 100 bytes"):
        Checkpointable(sequential(2), X, mem_limit=100)


def test_a_sequential_with_a_forward_of_its_own_is_traced() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    torch.manual_seed(0)
    model = Doubled(layer(), layer())
    plain, reference = step(model, X)
    peak, gradients = step(Checkpointable(model, X, mem_limit=plain), X)
    assert_same(gradients, reference)
    assert peak <= plain


def test_generator_states() -> None:
    model = Residual(3)
    plain, reference = step(model, X)
    wrapped = Checkpointable(model, X, mem_limit=plain, preserve_rng_state=False)
    _, gradients = step(wrapped, X)  # compiled: what was drawn is kept
    assert_same(gradients, reference)
    assert not any("rng_state" in text for text in wrapped._compiled.plan.sources().values())


@pytest.mark.long
def test_a_hugging_face_model() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(64, (4, 48))
    batch = {"input_ids": tokens, "labels": tokens}
    plain, _ = step(model, **batch)
    compiled = roundpipe_fx.compile(model)
    _, reference = step(compiled, **batch)
    wrapped = Checkpointable(model, batch, mem_limit=int(0.5 * plain))
    peak, gradients = step(wrapped, **batch)
    assert_same(gradients, reference)
    assert peak <= 0.5 * plain
    assert len(wrapped.sequence) > 2 * wrapped.chain.length + 1


@pytest.mark.long
def test_any_number_of_sequences_can_be_tried() -> None:
    """Dynamo compiles a function eight times and no more; a sequence that is replaced does not count."""
    model = Residual(2)
    plain, reference = step(model, X)
    wrapped = Checkpointable(model)
    wrapped.measure(X)
    for number in range(10):
        wrapped.compute_sequence(plain + number)
        assert_same(step(wrapped, X)[1], reference)
