"""Programs that ``torch.compile(backend="aot_eager")`` gets wrong, or got (torch 2.13), held against eager in float64.

Of all of them docs/pytorch-bugs.md says what PyTorch does and what is done here. Nothing is asserted of PyTorch: it may
be mended in any release.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe_fx
from tests.comparison import Step, train_step

Update = Callable[["Updating", torch.Tensor], torch.Tensor]


class Updating(nn.Module):
    """A weight and buffers of each kind; what is done with them is a function."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4))
        self.register_buffer("count", torch.ones((), dtype=torch.long))
        self.register_buffer("number", torch.ones(()))
        self.register_buffer("mean", torch.linspace(0.1, 0.4, 4))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("ring", torch.zeros(6, 4))
        self.update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.update(self, torch.sin(x * self.weight))


def _counter_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    return x * x.detach() + m.count * 0.01 * x


def _counter_before_and_after(m: Any, x: torch.Tensor) -> torch.Tensor:
    before = x.tanh() * (m.count * 0.5)
    m.count += 1
    return before + (x * (m.count * 0.25)).sin()


def _counter_in_a_power(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    return x / (1 - 0.9**m.count) * x


def _several_updates(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count.add_(1)
    first = x * (m.count + 1)
    m.count.mul_(3)
    second = first.sin() * (m.count - 1)
    m.count.copy_(m.count // 2)
    return second + x.cos() * (m.count * 0.1)


def _number_in_float64(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.number.add_(1)
    y = x * (m.number * 0.5)
    with torch.no_grad():
        m.number.copy_(torch.maximum(m.number, x.abs().max()))
    return y.sin() * (m.number + 1)


def _moving_average(m: Any, x: torch.Tensor) -> torch.Tensor:
    centred = (x - m.mean).sin() * (m.mean * 2)
    with torch.no_grad():
        m.mean.lerp_(x.mean(0), 0.1)
    return centred * (x - m.mean * 0.5).exp()


def _mask(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.where(m.seen.logical_not(), x, x * 0.5)
    m.seen.logical_or_(x.detach().amax(0) > 0.3)
    return y.sin() * torch.where(m.seen.logical_not(), x, 2 * x)


def _ring(m: Any, x: torch.Tensor) -> torch.Tensor:
    scores = x @ (m.ring + 0.1).t()
    m.ring[(m.count + torch.arange(3)) % 6] = x.detach()
    m.count.add_(3)
    return scores.sin() @ (m.ring * 2) * m.count


def _in_a_checkpoint(m: Any, x: torch.Tensor) -> torch.Tensor:
    def body(v: torch.Tensor) -> torch.Tensor:
        return (v * (m.count * 0.1)).sin() * (m.count + 1)

    m.count.add_(1)
    # An eager checkpoint reads in the backward what the buffer is by then, so eager it is none.
    y = roundpipe_fx.checkpoint(body, x) if torch.compiler.is_compiling() else body(x)
    m.count.mul_(2)
    return y * m.count + x


UPDATES = {
    update.__name__.strip("_"): update
    for update in (
        _counter_after,
        _counter_before_and_after,
        _counter_in_a_power,
        _several_updates,
        _number_in_float64,
        _moving_average,
        _mask,
        _ring,
        _in_a_checkpoint,
    )
}


class All(nn.Module):
    """All of them, each with its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Updating(update) for update in UPDATES.values())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(x).square().sum() for part in self.parts]).sum()


class Alone(nn.Module):
    def __init__(self, update: Update) -> None:
        super().__init__()
        self.part = Updating(update)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x).square().sum()


WAYS: dict[str, dict[str, Any]] = {
    "none": {"recompute": "none", "stages": 2},
    "full": {"recompute": "full", "stages": 3},
    "share": {"memory_budget": 0.0},
    "some": {"memory_budget": 0.5, "stages": 2},
    "pipeline": {"stages": 2, "devices": ["cpu", "cpu"], "num_microbatches": 1, "checkpoint": "always"},
}


def _steps(model: nn.Module, run: Any, count: int = 3) -> list[Step]:
    """Several, with other numbers each: buffers go on."""
    batches = [{"x": torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4) * (1 + i)} for i in range(count)]
    return [train_step(run, model, batch) for batch in batches]


def _assert_as_eager(found: list[Step], expected: list[Step]) -> None:
    for mine, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.loss, eager.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(mine.gradients, eager.gradients, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(mine.buffers, eager.buffers, rtol=1e-12, atol=1e-12)
    assert any(not torch.equal(a, b) for a, b in zip(found[0].buffers.values(), found[1].buffers.values(), strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.quick_every(3)
def test_buffers_that_are_updated_and_read(way: str) -> None:
    model = All().double()
    eager = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, **WAYS[way])
    _assert_as_eager(_steps(model, compiled), _steps(eager, eager))


@pytest.mark.parametrize("update", UPDATES)
def test_recomputation_reads_buffers_as_they_were(update: str) -> None:
    model = Alone(UPDATES[update]).double()
    eager = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, recompute="full")
    _assert_as_eager(_steps(model, compiled, 2), _steps(eager, eager, 2))


def test_microbatches_update_one_after_the_other() -> None:
    model = All().double()
    eager = copy.deepcopy(model)
    options = {"stages": 2, "devices": ["cpu", "cpu"], "num_microbatches": 2, "loss_reduction": "sum"}
    piped = roundpipe_fx.compile(model, memory_budget=0.0, **options)
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(6, 4)
    for _ in range(2):
        model.zero_grad()
        eager.zero_grad()
        loss = piped.forward_backward(x)
        expected = sum(_backward(eager(half)) for half in x.chunk(2))
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        for (name, mine), other in zip(model.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()), rtol=1e-12, atol=1e-12)


def _backward(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


_ON_NUMBERS = {
    "add_": lambda b, x: b.add_(1),
    "mul_": lambda b, x: b.mul_(2),
    "fill_": lambda b, x: b.fill_(3),
    "zero_": lambda b, x: b.zero_(),
    "copy_": lambda b, x: b.copy_(x.detach().abs().max()),
    "lerp_": lambda b, x: b.lerp_(x.detach().mean(), 0.5),
    "out": lambda b, x: torch.add(b, 1, out=b),
}


class Number(nn.Module):
    """A number in float64 that is updated in every way; nobody reads what an update returns."""

    def __init__(self) -> None:
        super().__init__()
        for name in _ON_NUMBERS:
            self.register_buffer(f"of_{name}", torch.ones(()))
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        for name, update in _ON_NUMBERS.items():
            buffer = getattr(self, f"of_{name}")
            y = y * (buffer + 1)
            update(buffer, y)
            y = y / (buffer + 2)
        return y.square().sum()


@pytest.mark.parametrize("through", ["compile", "backend"])
def test_updates_of_numbers_in_float64_are_not_lost(through: str) -> None:
    model = Number().double()
    eager = copy.deepcopy(model)
    compiled: Any = (
        roundpipe_fx.compile(model) if through == "compile" else torch.compile(model, backend="roundpipe_fx")
    )
    _assert_as_eager(_steps(model, compiled, 2), _steps(eager, eager, 2))


class Noise(nn.Module):
    """A mask for values that lie otherwise in memory than their dimensions follow each other."""

    def __init__(self, draw: Any, lay: Any) -> None:
        super().__init__()
        self.layer, self.draw, self.lay = nn.Linear(8, 84), draw, lay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.lay(self.layer(x).view(-1, 2, 7, 6)) * 1.5
        return (images * self.draw(images)).sin().mean()


DRAWS: dict[str, Any] = {
    "bernoulli_": lambda w: torch.empty_like(w).bernoulli_(0.6),
    "bernoulli_ on ones": lambda w: torch.ones_like(w).bernoulli_(0.6),
    "bernoulli_ on a part": lambda w: torch.ones_like(w)[:, :, ::2].bernoulli_(0.6).mean(2, keepdim=True),
    "bernoulli_ with tensors": lambda w: torch.empty_like(w).bernoulli_(w.detach().sigmoid()),
    "bernoulli": lambda w: torch.bernoulli(w.detach(), 0.6),
    "bernoulli of new memory": lambda w: torch.bernoulli(torch.empty_like(w), 0.6),
    "bernoulli of values": lambda w: torch.bernoulli(w.detach().sigmoid()),
    "dropout": lambda w: nn.functional.dropout(torch.ones_like(w), 0.3),
    "dropout in place": lambda w: nn.functional.dropout(torch.ones_like(w), 0.3, inplace=True),
    "alpha_dropout": lambda w: nn.functional.alpha_dropout(w.detach(), 0.3, training=True),
    "dropout2d": lambda w: nn.functional.dropout2d(w.detach(), 0.3),
    "uniform_": lambda w: torch.empty_like(w).uniform_(),
    "normal_": lambda w: torch.empty_like(w).normal_(),
    "normal_ on a part": lambda w: torch.ones_like(w)[:, :, ::2].normal_().mean(2, keepdim=True),
    "normal_ on a column": lambda w: (
        w.new_ones(30, 2)[:, 1].normal_(1, 2).mean() + w.new_ones(31, 2)[:, 1:].normal_().std()
    ),
    "exponential_": lambda w: torch.empty_like(w).exponential_(),
    "geometric_": lambda w: torch.empty_like(w).geometric_(0.5),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
}
LAYS: dict[str, Any] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "contiguous": lambda x: x,
}


@pytest.mark.parametrize("lay", LAYS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.quick_every(7)
def test_numbers_drawn_in_place_fall_in_the_order_of_memory(draw: str, lay: str) -> None:
    model, x = Noise(DRAWS[draw], LAYS[lay]).double(), torch.randn(4, 8, dtype=torch.float64)
    eager = train_step(model, model, {"x": x})
    for options in ({}, {"memory_budget": 0.0}, WAYS["pipeline"]):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(model, **options)
        found = train_step(compiled, model, {"x": x})
        torch.testing.assert_close(found.loss, eager.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(found.gradients, eager.gradients, rtol=1e-12, atol=1e-14)


class Hidden(nn.Module):
    """Updates a buffer and a parameter twice behind autograd's back, with products of views of their old values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data.copy_(self.mean.data * 0.9 + 0.1 * x.mean(0))
        hidden = self.layer(x) * self.mean
        self.scale.data.copy_(self.scale.data.clamp(max=0.5))
        self.mean.data.copy_(self.mean.data * 0.9 + 0.1 * hidden.detach().mean(0))
        return (self.layer(hidden.sin() * self.scale) * self.mean).square().sum()


def test_views_of_a_buffers_old_value_are_not_written_over_where_it_is_read_again() -> None:
    eager, x = Hidden().double(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
    model = copy.deepcopy(eager)
    compiled = roundpipe_fx.compile(model, memory_budget=0.0)
    for _ in range(2):
        expected, found = train_step(eager, eager, {"x": x}), train_step(compiled, model, {"x": x})
        torch.testing.assert_close(found.gradients, expected.gradients, rtol=1e-12, atol=1e-14)


def _autocast(dtype: torch.dtype | None) -> torch.autocast:
    """Without a cache of casts, with which eager PyTorch adds gradients of two uses of a weight in the cast's dtype."""
    return torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)


class Squared(torch.autograd.Function):
    """In the backward a product of its own, whose dtype is that of its operands unless there is autocast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return ((gradient + gradient.t()).float() @ x.float()).to(x.dtype)


def _off_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with _autocast(None):
        return m.b(m.a(x).float())


def _off_around_on(m: Any, x: torch.Tensor) -> torch.Tensor:
    with _autocast(None):
        y = m.b(x.float())
        with _autocast(torch.bfloat16):
            y = m.a(y)
        return m.b(y.float())


def _another_dtype_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with _autocast(torch.float16):
        y = m.b(m.a(x)).tanh()
    return m.a(y)


def _in_a_recomputed_region(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = torch.utils.checkpoint.checkpoint(_off_inside, m, x, use_reentrant=False)
    return torch.utils.checkpoint.checkpoint(_off_inside, m, y.tanh(), use_reentrant=False)


def _behind_a_graph_break(m: Any, x: torch.Tensor) -> torch.Tensor:
    with _autocast(torch.bfloat16):
        y = m.a(x)
        torch._dynamo.graph_break()
        y = m.b(y)
        with _autocast(None):
            return m.b(y.float())


def _a_function_of_the_users(m: Any, x: torch.Tensor) -> torch.Tensor:
    return Squared.apply(m.a(x))


def _on_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    with _autocast(torch.bfloat16):
        y = m.a(x)
    return m.b(y.float())


REGIONS = {
    region.__name__.strip("_"): region
    for region in (
        _off_inside,
        _off_around_on,
        _another_dtype_inside,
        _in_a_recomputed_region,
        _behind_a_graph_break,
        _a_function_of_the_users,
        _on_inside,
    )
}


class Mixed(nn.Module):
    def __init__(self, region: Any) -> None:
        super().__init__()
        self.a, self.b, self.region = nn.Linear(16, 16), nn.Linear(16, 16), region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.region(self, x).float().square().sum()


def _through(door: str, model: nn.Module, **options: Any) -> Any:
    if door == "compile":
        return roundpipe_fx.compile(model, **options)
    if door == "in place":
        model.compile(backend="roundpipe_fx", options=options)
        return model
    return torch.compile(model, backend="roundpipe_fx", options=options)


DOORS = ("compile", "in place", "torch.compile")


@pytest.mark.filterwarnings("ignore::roundpipe_fx.GraphBreakWarning")
@pytest.mark.parametrize("region", REGIONS)
def test_backwards_of_regions_of_autocast_are_run_without(region: str) -> None:
    x = torch.linspace(-1, 1, 128).view(8, 16).sin()

    def gradients(run: Any, model: nn.Module, dtype: torch.dtype | None) -> list[torch.Tensor]:
        model.zero_grad()
        with _autocast(dtype) if dtype is not None or region != "another_dtype_inside" else _autocast(torch.bfloat16):
            loss = run(x)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for door in DOORS if region == "off_inside" else DOORS[:1]:
        model = Mixed(REGIONS[region])
        eager = copy.deepcopy(model)
        compiled = _through(door, model, memory_budget=0.0)
        for dtype in (torch.bfloat16, None):
            found, expected = gradients(compiled, model, dtype), gradients(eager, eager, dtype)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (door, dtype)


class Inverse(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.linalg.pinv(self.w) @ x).abs().square().sum()


@pytest.mark.parametrize("door", DOORS)
def test_conjugates_are_resolved_in_the_first_call(door: str) -> None:
    model, x = Inverse(torch.complex128), torch.randn(4, 2, dtype=torch.complex128)
    expected = train_step(model, model, {"x": x})
    compiled = _through(door, model, memory_budget=0.0)
    for _ in range(2):
        found = train_step(compiled, model, {"x": x})
        torch.testing.assert_close((found.loss, found.gradients), (expected.loss, expected.gradients))


def test_conjugates_are_resolved_while_something_is_measured() -> None:
    model, x = Inverse(torch.complex128), torch.randn(4, 2, dtype=torch.complex128)
    expected = model(x)
    with roundpipe_fx.measure_peak("cpu"):
        assert torch.equal(model(x), expected)
    with roundpipe_fx.count_host_syncs():
        assert torch.equal(model(x), expected)


@torch.library.custom_op("pytorch_bugs::twice_the_conjugate", mutates_args=())
def _twice_the_conjugate(x: torch.Tensor) -> torch.Tensor:
    return x.conj() * 2


@_twice_the_conjugate.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_operators_of_the_users_may_conjugate_in_the_first_call() -> None:
    x = torch.randn(4, dtype=torch.complex128)
    found = torch.compile(lambda x: _twice_the_conjugate(x), backend="roundpipe_fx")(x)
    assert torch.equal(found, x.conj() * 2)


class Named(torch.Tensor):
    """A plain subclass."""


class Guarded(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Named, Guarded])
@pytest.mark.parametrize("door", DOORS)
def test_inputs_of_plain_subclasses_of_tensors(door: str, kind: type) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    compiled = _through(door, model, memory_budget=0.0)
    for _ in range(2):
        model.zero_grad()
        y = compiled(x.as_subclass(kind))
        assert type(y) is kind
        y.square().sum().backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))


def _base_written(base: torch.Tensor, part: torch.Tensor) -> Any:
    base.mul_(2)
    return part[0]


def _part_written(base: torch.Tensor, part: torch.Tensor) -> Any:
    part.mul_(2)
    return base[2], base.sum()


def _both_written(base: torch.Tensor, part: torch.Tensor) -> Any:
    base.mul_(2)
    part.add_(1)
    return part[0], part, base[1] + 1


def _nothing_returned_of_them(base: torch.Tensor, part: torch.Tensor) -> Any:
    base.mul_(2)
    return part.flatten()[:3] + 1


WRITES = (_base_written, _part_written, _both_written, _nothing_returned_of_them)
PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda base: base[2:],
    "a transpose": lambda base: base.t(),
    "a part of rows": lambda base: base.view(-1)[4:10].view(2, 3),
    "the same tensor": lambda base: base,
    "another dtype": lambda base: base.view(torch.int64),
    "a detached one": lambda base: base.detach()[1:],
    "a copy": lambda base: base[2:].clone(),
}


class Writing(nn.Module):
    """Writes to inputs that share memory."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.scale, self.write = nn.Parameter(torch.ones(())), write

    def forward(self, base: torch.Tensor, part: torch.Tensor) -> Any:
        outputs = self.write(base, part)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return (*outputs, (outputs[0].detach().double() * self.scale).sum())


@pytest.mark.filterwarnings("ignore:roundpipe_fx.*share memory")
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__.strip("_"))
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.quick_every(2)
def test_inputs_that_share_memory_and_are_written(door: str, write: Any) -> None:
    eager = Writing(write).double()
    model = copy.deepcopy(eager)
    compiled = _through(door, model, memory_budget=0.0)
    for part in PARTS:  # one after the other: what was compiled for one is not right for the next

        def step(run: Any, model: nn.Module, part: str = part) -> list[torch.Tensor]:
            model.zero_grad()
            base = torch.arange(1.0, 10.0 if part == "a transpose" else 13.0, dtype=torch.float64).view(-1, 3)
            inputs = base, PARTS[part](base)
            outputs = run(*inputs)
            outputs[-1].backward()
            values = [value.detach().clone() for value in (*outputs, *inputs, *(p.grad for p in model.parameters()))]
            base.zero_()  # what is a view of it has new values too
            return [*values, *(output.detach().clone() for output in outputs)]

        if write is not _base_written and part == "another dtype":
            continue
        expected, values = step(eager, eager), step(compiled, model)
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)), part


def test_inputs_that_share_memory_as_they_have_not_before_are_told_of() -> None:
    def write(base: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        base.mul_(2)
        return part + 1

    compiled = torch.compile(write, backend="roundpipe_fx")
    base = torch.ones(4, 3)
    assert torch.equal(compiled(base, torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with pytest.warns(UserWarning, match="'base' and 'part' share memory, and the model writes to 'base'"):
        assert torch.equal(compiled(base, base[2:]), torch.full((2, 3), 5.0))


def test_a_pipeline_refuses_inputs_that_share_memory() -> None:
    class Net(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return (super().forward(y) * x).square().mean()

    base = torch.randn(5, 3)
    compiled = roundpipe_fx.compile(Net(3, 3), num_microbatches=2)
    with pytest.raises(ValueError, match=r"share memory, and the model writes.*A pipeline cannot run them"):
        compiled.forward_backward(base[:4], base[1:])


class Cubed(torch.autograd.Function):
    """With a backward that is not the derivative, so that it shows which one ran."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3.3 * x**2


TRANSFORMS: dict[str, Any] = {
    "grad": lambda layer, x: torch.func.grad(lambda v: Cubed.apply(layer(v)).sum())(x).sum(),
    "vjp": lambda layer, x: torch.func.vjp(lambda v: Cubed.apply(layer(v)), x)[1](torch.ones_like(x))[0].sum(),
    "vmap": lambda layer, x: torch.func.vmap(lambda v: Cubed.apply(layer(v)))(x).sum(),
    "of each sample": lambda layer, x: torch.func.vmap(torch.func.grad(lambda v: Cubed.apply(layer(v)).sum()))(x).sum(),
    "beside": lambda layer, x: (
        Cubed.apply(layer(x)).sum() + torch.func.grad(lambda v: layer(v).square().sum())(x).sum()
    ),
}


class Transforming(nn.Module):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.layer, self.transform = nn.Linear(4, 4), transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(self.layer, x)


@pytest.mark.filterwarnings("ignore::roundpipe_fx.GraphBreakWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functions_with_a_backward_inside_transforms(transform: str) -> None:
    model, x = Transforming(TRANSFORMS[transform]).double(), torch.randn(3, 4, dtype=torch.float64)
    eager = train_step(model, model, {"x": x})
    found = train_step(roundpipe_fx.compile(model), model, {"x": x})
    torch.testing.assert_close((found.loss, found.gradients), (eager.loss, eager.gradients), rtol=1e-12, atol=1e-12)


def test_the_break_at_a_function_inside_a_transform_is_told_of() -> None:
    model = Transforming(TRANSFORMS["vmap"])
    with pytest.warns(roundpipe_fx.GraphBreakWarning, match=r"Cubed, an autograd\.Function inside torch\.func\.grad"):
        roundpipe_fx.compile(model)(torch.randn(3, 4))


class Unusable(torch.autograd.Function):
    """With a gradient of a wrong shape."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[:1]


def _updated_behind_its_reader(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    z = y * 1
    y.mul_(2)
    return y + z


INVALID: dict[str, tuple[Any, str]] = {
    "shape": (Unusable.apply, "returned an invalid gradient"),
    "update": (_updated_behind_its_reader, "modified by an inplace operation"),
    "missing": (lambda x: torch.linalg.ldl_factor(x @ x.t())[0], "is not implemented"),
}


class Forward(nn.Module):
    def __init__(self, compute: Any) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.layer(x))


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", INVALID)
def test_a_forward_runs_whose_backward_is_invalid(kind: str, door: str) -> None:
    compute, message = INVALID[kind]
    model, x = Forward(compute), torch.randn(4, 4)
    expected = model(x)
    compiled = _through(door, model)
    with pytest.warns(UserWarning, match=f"gradients cannot be computed: .*{message}"):
        y = compiled(x)
    assert torch.equal(y, expected)
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_a_backward_under_autocast_is_told_of_or_traced_so() -> None:
    model, x = Mixed(_off_inside), torch.randn(8, 16)

    def gradients(run: Any) -> list[torch.Tensor]:
        model.zero_grad()
        with _autocast(torch.bfloat16):
            run(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with pytest.warns(
        UserWarning, match=r"backward\(\) is called under autocast.*test_pytorch_bugs\.py:\d+ are computed"
    ):
        gradients(roundpipe_fx.compile(model))
    with torch._functorch.config.patch(backward_pass_autocast=[{"device_type": "cpu", "cache_enabled": False}]):
        found = gradients(roundpipe_fx.compile(model))
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(model), strict=True))
