"""What kernels allocate for themselves: measured, planned with, and seen where it depends on data."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.utils import parametrizations
from torch.profiler import ProfilerActivity, profile

import roundpipe_fx
from benchmarks.fuzz.meter import AllocatorPeak
from roundpipe_fx.analysis.cost import depends_on_data, predict_workspaces, probe
from roundpipe_fx.operators.log_sum_exp import log_sum_exp
from roundpipe_fx.passes import workspaces
from tests.comparison import aot_eager_step, assert_bitwise, train_step

aten = torch.ops.aten
CPU = torch.device("cpu")


def node_of(target, *shapes_and_dtypes, arguments=()) -> fx.Node:
    """A node that calls an operator on fake tensors."""
    graph = fx.Graph()
    inputs = []
    mode = torch._subclasses.fake_tensor.FakeTensorMode()
    with mode:
        values = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes]
        result = target(*values, *arguments)
    for index, value in enumerate(values):
        inputs.append(graph.placeholder(f"x{index}"))
        inputs[-1].meta["val"] = value
    node = graph.call_function(target, (*inputs, *arguments))
    node.meta["val"] = result
    return node


def workspace_of(node: fx.Node, **options) -> int:
    return predict_workspaces([node], CPU, **options).get(node, 0)


def test_what_a_kernel_converts_is_its_own() -> None:
    size = ((64, 32), torch.float32)
    half = ((64, 32), torch.bfloat16)
    assert workspace_of(node_of(aten.add.Tensor, size, size)) == 0
    assert workspace_of(node_of(aten.add.Tensor, size, half)) == 64 * 32 * 4
    # A number becomes a tensor of one element, and is converted: whatever the size of the other operand.
    assert 0 < workspace_of(node_of(aten.mul.Tensor, size, arguments=(2.5,))) <= 16
    assert workspace_of(node_of(aten.mul.Tensor, size, half), fused=True) == 0


@pytest.mark.parametrize("words", [2, 64])
def test_a_log_sum_exp_has_a_workspace_before_it_was_run(words: int) -> None:
    """In narrow tiles of the vocabulary, what it has for each row is much of a step."""
    x = torch.randn(64, words)
    with roundpipe_fx.measure_peak("cpu") as peak:
        result = log_sum_exp(x, [-1])
    node = node_of(log_sum_exp, ((64, words), torch.float32), arguments=([-1],))
    assert not depends_on_data(node)
    assert workspace_of(node) == peak.bytes - result.nbytes > result.nbytes


def test_what_is_measured_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_fx.analysis.cost import probe

    ran = []
    watch = probe.profile_memory

    def watched(run, device_type, seen):
        ran.append(watch(run, device_type, seen))
        return ran[-1]

    monkeypatch.setattr(probe, "profile_memory", watched)
    state = torch.get_rng_state()
    workspace_of(node_of(aten.bernoulli.p, ((61, 32), torch.float32), arguments=(0.5,)))
    (drawn,) = ran
    assert 0 < drawn.sum() < 61 * 32  # numbers were drawn
    assert torch.equal(state, torch.get_rng_state())


def test_matrices_are_not_multiplied_to_know_that_nothing_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_fx.analysis.cost import workspace

    monkeypatch.setattr(workspace, "_measure", lambda *_: pytest.fail("measured"))
    assert workspace_of(node_of(aten.mm.default, ((8, 4), torch.float32), ((4, 8), torch.float32))) == 0


def test_the_same_on_the_same_shapes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_fx.analysis.cost import workspace

    measured = []
    monkeypatch.setattr(workspace, "_measure", lambda node, _: measured.append(node) or 7)
    nodes = [node_of(aten.cumsum.default, ((n, 4), torch.bool), arguments=(0,)) for n in (8, 8, 9)]
    assert set(predict_workspaces(nodes, CPU).values()) == {7} and len(measured) == 2


def test_a_profiler_of_the_user_does_not_disturb() -> None:
    node = node_of(aten.add.Tensor, ((64, 32), torch.float32), ((64, 32), torch.bfloat16))
    with profile(activities=[ProfilerActivity.CPU]):
        assert workspace_of(node) == 64 * 32 * 4


class Converting(nn.Module):
    """Its peak is where a kernel converts an operand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)) * y).square().sum()


def simulate_step_peak(run, model: nn.Module, batch: dict) -> int:
    for _ in range(2):
        model.zero_grad()
        with roundpipe_fx.measure_peak("cpu") as peak:
            run(**batch).backward()
    return peak.bytes


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"memory_budget": 0.0}, {"memory_budget": 1.0}])
def test_it_is_in_the_plan(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Converting()
    batch = {"x": torch.randn(512, 64), "y": torch.ones(512, 256, dtype=torch.bfloat16)}
    compiled = roundpipe_fx.compile(copy.deepcopy(model), fullgraph=True, **options)
    measured = simulate_step_peak(compiled, compiled, batch)
    assert measured <= compiled.plan.peak_bytes <= measured + 64
    assert any(value.name.startswith("workspace of ") for value in compiled.plan.peak.live)
    monkeypatch.setattr(workspaces, "predict_workspaces", lambda *_: {})
    blind = roundpipe_fx.compile(copy.deepcopy(model), fullgraph=True, **options).trace(**batch)
    assert blind.peak_bytes < measured


@torch.library.custom_op("roundpipe_fx_tests::greedy", mutates_args=())
def greedy(x: torch.Tensor) -> torch.Tensor:
    """Needs ten times its operand for itself."""
    return x.repeat(10, 1)[: len(x)] * 2


@greedy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


greedy.register_autograd(lambda ctx, gradient: gradient * 2)


class Greedy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return greedy(torch.tanh(self.layer(x))).square().sum()


def test_what_other_operators_need_is_seen_in_the_first_step() -> None:
    model, batch = Greedy(), {"x": torch.randn(128, 32)}
    reference = aot_eager_step(model, batch)
    compiled = roundpipe_fx.compile(model, memory_budget=1.0, fullgraph=True)
    assert_bitwise(train_step(compiled, model, batch), reference)
    first = compiled.plan
    assert not first.assumed
    assert_bitwise(train_step(compiled, model, batch), reference)
    assert compiled.plan.assumed["workspace of roundpipe_fx_tests.greedy.default"] >= 10 * 128 * 32 * 4
    assert "workspace of roundpipe_fx_tests.greedy.default ≤ " in str(compiled.plan)
    assert compiled.plan.peak_bytes >= first.peak_bytes + 9 * 128 * 32 * 4
    plans = len(compiled.plans)
    assert simulate_step_peak(compiled, model, batch) <= compiled.plan.peak_bytes
    assert len(compiled.plans) == plans  # known now
    with profile(activities=[ProfilerActivity.CPU]):  # a profiler of the user's goes first
        assert_bitwise(train_step(compiled, model, batch), reference)


def test_what_depends_on_numbers_is_the_most_that_several_need() -> None:
    matrix = ((64, 64), torch.float32)
    assert workspace_of(node_of(aten.linalg_matrix_exp.default, matrix)) >= 12 * 64 * 64 * 4


class Squared(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


class Codebook(nn.Module):
    """Vector quantization: its codes follow a moving average."""

    def __init__(self, width: int = 16, codes: int = 32) -> None:
        super().__init__()
        self.encode, self.decode, self.codes = nn.Linear(width, width), nn.Linear(width, width), codes
        self.register_buffer("embed", torch.randn(codes, width))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.embed.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.encode(x))
        index = torch.cdist(z, self.embed).argmin(1)
        chosen = nn.functional.embedding(index, self.embed)
        with torch.no_grad():
            self.count.mul_(0.9).add_(nn.functional.one_hot(index, self.codes).to(z.dtype).sum(0), alpha=0.1)
            self.total.mul_(0.9).index_add_(0, index, z * 0.1)
            self.embed.copy_(self.total / self.count.unsqueeze(1))
        straight = self.decode(z + (chosen - z).detach())
        return straight + 0.25 * nn.functional.mse_loss(z, chosen.detach())


NETS = {
    "orthogonal": lambda: (parametrizations.orthogonal(nn.Linear(32, 32)), torch.randn(5, 32)),
    "sum": lambda: (nn.EmbeddingBag(200, 16, mode="sum"), torch.randint(0, 200, (64, 20))),
    "sparse sum": lambda: (nn.EmbeddingBag(200, 16, mode="sum", sparse=True), torch.randint(0, 200, (64, 20))),
    "max": lambda: (nn.EmbeddingBag(200, 16, mode="max"), torch.randint(0, 200, (64, 20))),
    "codebook": lambda: (Codebook(), torch.randn(8, 16)),
    "norm of columns": lambda: (Columns(nn.LayerNorm(48)), torch.randn(4, 48, 64)),
    "convolution of columns": lambda: (Columns(nn.Conv1d(64, 8, 3)), torch.randn(4, 48, 64)),
    "fused multiply-add": lambda: (FusedMultiplyAdd(), torch.randn(40, 64)),
}


class FusedMultiplyAdd(nn.Module):
    """``addcmul_`` with a factor is traced as a primitive, which runs as a product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x).sin()
        return (y * 1.25).addcmul_(y, y, value=0.3).sin()


class Columns(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(64, 64), layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.first(x).transpose(1, 2))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.quick_every(3)
def test_a_step_takes_no_more_than_planned(name: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    net, x = NETS[name]()
    compiled = roundpipe_fx.compile(Squared(net), memory_budget=0.0, dynamic=dynamic)
    assert simulate_step_peak(compiled, compiled, {"x": x}) <= compiled.plan.peak_bytes <= compiled.plan.budget


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.view_as_real(torch.view_as_complex(x) * (1 + 2j)),
        lambda x: (x * 1j).real,
        lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * torch.view_as_complex(x).sin()),
        lambda x: x * ((x.detach() * 3).long() > 2.5),
        lambda x: x * torch.view_as_complex(x).abs()[..., None],
    ],
)
def test_numbers_of_another_kind(compute) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return compute(x).sin().sum()

    x = torch.randn(40, 50, 2, dtype=torch.float64, requires_grad=True)
    model = roundpipe_fx.compile(Net(), memory_budget=0.0)
    model(x).backward()
    x.grad = None
    with AllocatorPeak() as allocated:
        model(x).backward()
    assert allocated.peak == model.plan.peak_bytes


@pytest.mark.parametrize("window", [torch.hann_window, torch.blackman_window, torch.fft.fftfreq, torch.randperm])
def test_operators_without_operands_are_measured(window) -> None:
    """A periodic window shows all but the last element of a longer one; a permutation has keys of its own."""

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * window(x.shape[0])).sin().sum()

    x = torch.randn(1000, requires_grad=True)
    model = roundpipe_fx.compile(Net(), memory_budget=0.0)
    model(x).backward()
    x.grad = None
    with AllocatorPeak() as allocated:
        model(x).backward()
    assert allocated.peak <= model.plan.peak_bytes
    assert model.plan.peak_bytes <= allocated.peak + torch.get_rng_state().nbytes


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The largest integer that each trial is made up with."""
    found: list[int] = []
    synthetic = probe.synthetic_operands

    def noted(node: fx.Node, device: torch.device, fill, single: bool):
        found.append(int(fill(torch.empty(100, dtype=torch.int64)).max()))
        return synthetic(node, device, fill, single)

    monkeypatch.setattr(probe, "synthetic_operands", noted)
    monkeypatch.setattr(probe, "_probed", {})
    return found


@pytest.mark.parametrize("rows", [1, 3])
def test_indices_are_within_a_table_that_is_not_an_operand(rows: int, largest: list[int]) -> None:
    """The gradient of an embedding bag has the table's rows in its result only, and its kernel checks no index."""
    torch._dynamo.reset()
    model = roundpipe_fx.compile(nn.EmbeddingBag(rows, 8, mode="sum"))
    model(torch.zeros(12, 7, dtype=torch.int64)).sum().backward()
    assert len(largest) >= 3 and max(largest) < rows


def test_integers_that_are_no_indices_are_tried_as_ones_whatever_the_sizes(largest: list[int]) -> None:
    row = ((1, 5), torch.int64)
    workspace_of(node_of(aten.isin.Tensor_Tensor, row, row))
    assert 1 in largest


def test_what_collectives_copy_is_not_observed() -> None:
    """Gloo frees its copies in threads of its own, so ranks that observe them plan for different bytes."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        size, operand = 64 * 32 * 4, ((64, 32), torch.float32)
        of = {
            ops.all_reduce.default: (("sum", group), 0),
            ops.reduce_scatter_tensor.default: (("sum", 1, group), size),
            ops.all_gather_into_tensor.default: ((1, group), 2 * size),
        }
        for target, (arguments, copied) in of.items():
            node = node_of(target, operand, arguments=arguments)
            wait = node.graph.call_function(ops.wait_tensor.default, (node,))
            wait.meta["val"] = node.meta["val"].clone()
            for own in (node, wait):
                assert not depends_on_data(own)
                assert workspace_of(own, learned={str(own.target): 1}) == copied
    finally:
        dist.destroy_process_group()


class _Beside(nn.Module):
    """Returns a mean, and beside it what nobody differentiates."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(8, 8), beside

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        return hidden.square().mean(), self.beside(hidden)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(8, 8),
        lambda: nn.LayerNorm(8),
        lambda: nn.Softmax(-1),
        lambda: nn.Conv1d(8, 8, 3, padding=1),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Unflatten(2, (2, 4))),
    ],
    ids=["linear", "norm", "softmax", "convolution", "view"],
)
def test_kernels_that_copy_zeros_of_missing_gradients_are_planned_for(make: Callable[[], nn.Module]) -> None:
    compiled = roundpipe_fx.compile(_Beside(make()), memory_budget=1.0)
    x = torch.randn(32, 8, 8)
    for _ in range(3):
        compiled.zero_grad()
        with AllocatorPeak() as allocated:
            output = compiled(x)
            output[0].backward()
        del output
    assert compiled.plan.budget is not None and allocated.peak == compiled.plan.peak_bytes
