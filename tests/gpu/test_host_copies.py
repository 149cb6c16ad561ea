"""Values of an ordinary model that leave a CUDA device for the host: selective policies that offload, and fairscale's
``offload_to_cpu``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import roundpipe_fx
from roundpipe_fx.torch_private import offload_operators

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(offload_operators() is None, reason="this PyTorch has no operators that copy to the host"),
]

ROWS, WIDTH, LAYERS = 1024, 64, 8
SENT = 4 * ROWS * 4 * WIDTH


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(torch.tanh(self.up(x))), 0.1, self.training)


class Selective(nn.Module):
    """Each layer is a checkpoint whose ``tanh`` has a policy."""

    def __init__(self, policy: str | None) -> None:
        super().__init__()
        self.layers, self.policy = nn.ModuleList(Layer() for _ in range(LAYERS)), policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.policy is None:
                x = layer(x)
                continue
            named = getattr(CheckpointPolicy, self.policy)

            def chosen(_: Any, op: Any, *args: Any, named: Any = named, **kwargs: Any) -> Any:
                return named if op is torch.ops.aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE

            contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()


def _steps(run: Any, model: nn.Module, x: torch.Tensor, again: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = run(x)
        if again:
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return found


def _compiled(policy: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Selective(policy).cuda()
    return model, roundpipe_fx.compile(model, fullgraph=True, dynamic=False, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "full"}, {"memory_budget": 0.5}, {"stages": 3}],
    ids=["default", "full", "half", "three"],
)
@pytest.mark.parametrize("again", [False, True], ids=["", "again"])
def test_values_that_a_policy_must_offload_are_on_the_host(options: dict[str, Any], again: bool) -> None:
    torch.manual_seed(0)
    eager, x = Selective(None).cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    expected = _steps(eager, eager, x)
    peaks = {}
    for policy in ("MUST_SAVE", "MUST_CPU_OFFLOAD"):
        model, compiled = _compiled(policy, host_budget=0, **options)  # of what the policy does not say, nothing leaves
        found = _steps(compiled, model, x, again)
        assert all(map(torch.equal, found, expected))
        program = compiled.plan.sources()["program.py"]
        sent = program.count("ao.offload")
        assert program.count("ao.reload") == sent and (sent > 0) == (policy == "MUST_CPU_OFFLOAD")
        model.zero_grad()
        with roundpipe_fx.measure_peak("cuda") as peak:
            compiled(x).backward()
        assert peak.bytes <= compiled.plan.peak_bytes
        peaks[policy] = compiled.plan.peak_bytes
    if "stages" not in options:
        assert sent >= LAYERS - 2
        assert peaks["MUST_CPU_OFFLOAD"] <= peaks["MUST_SAVE"] - 2 * SENT


def test_what_leaves_counts_in_budgets() -> None:
    """Of checkpoints that must offload, less is needed than of those that must save, by most of what leaves."""
    x = torch.randn(ROWS, WIDTH, device="cuda")
    least = {}
    for policy in ("MUST_SAVE", "MUST_CPU_OFFLOAD"):
        _, compiled = _compiled(policy, memory_budget=1)
        with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
            compiled(x)
        least[policy] = refused.value.minimum
    assert least["MUST_CPU_OFFLOAD"] <= least["MUST_SAVE"] - (LAYERS - 4) * SENT
    budget = least["MUST_CPU_OFFLOAD"]
    model, compiled = _compiled("MUST_CPU_OFFLOAD", memory_budget=budget)
    found = _steps(compiled, model, x)
    torch.manual_seed(0)
    eager = Selective(None).cuda()
    assert all(map(torch.equal, found, _steps(eager, eager, x)))
    model.zero_grad()
    with roundpipe_fx.measure_peak("cuda") as peak:
        compiled(x).backward()
    assert peak.bytes <= budget


def test_inputs_of_wrapped_layers_are_on_the_host() -> None:
    """Of a model of another library, with sizes that vary."""
    torch.manual_seed(0)
    eager = Selective(None).cuda()
    torch.manual_seed(0)
    model = Selective(None).cuda()
    for index in range(LAYERS):
        model.layers[index] = roundpipe_fx.checkpoint_wrapper(model.layers[index], offload_to_cpu=True)
    compiled = roundpipe_fx.compile(model, fullgraph=True)
    for rows in (ROWS, ROWS // 2, ROWS // 4):
        x = torch.randn(rows, WIDTH, device="cuda")
        assert all(map(torch.equal, _steps(compiled, model, x), _steps(eager, eager, x)))
        assert compiled.plan.sources()["program.py"].count("ao.offload") >= LAYERS - 2, rows
    plan = compiled.plan
    assert plan.host_bytes >= (LAYERS - 2) * 4 * ROWS // 4 * WIDTH
    (name, *_) = plan.on_host
    assert "on the host from the forward to the backward" in plan.explain(name)
    assert "and on the host" in str(plan) and "; offloaded" in plan.details()
    assert roundpipe_fx.Plan.from_json(plan.to_json()).on_host == plan.on_host


class WithEmpty(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.none = nn.ParameterList([torch.zeros(0, WIDTH), torch.zeros(0, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(none.tanh().sum() for none in self.none)


def test_empty_values_stay() -> None:
    torch.manual_seed(0)
    eager, model, x = Selective(None), Selective("MUST_CPU_OFFLOAD"), torch.randn(ROWS, WIDTH, device="cuda")
    eager.layers = nn.ModuleList(WithEmpty() for _ in range(LAYERS))
    model.layers = copy.deepcopy(eager.layers)
    eager, model = eager.cuda(), model.cuda()
    compiled = roundpipe_fx.compile(model, fullgraph=True, dynamic=False)
    assert all(map(torch.equal, _steps(compiled, model, x), _steps(eager, eager, x)))
    assert compiled.plan.sources()["program.py"].count("ao.offload") >= LAYERS - 2


class Largest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, _ = self.linear(x).max(-1, keepdim=True)
        top, where = x.topk(4, -1)
        return x + torch.zeros_like(x).scatter(1, where, top.sin()) * values


def _checkpointed(model: nn.Sequential, *offloaded: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A loss of layers of which each is a checkpoint that must offload the results of some operators."""

    def chosen(_: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_CPU_OFFLOAD if op in offloaded else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    return loss_of


def test_values_come_back_beside_recomputation() -> None:
    """Their memory is the main stream's, whatever stream the calls beside the copy are on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Largest() for _ in range(6))).cuda()
    eager, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, device="cuda")

    loss_of = _checkpointed(model, torch.ops.aten.max.dim)
    compiled = torch.compile(loss_of, backend="roundpipe_fx", fullgraph=True, dynamic=False)
    found = _steps(compiled, model, x)
    assert all(map(torch.equal, found, _steps(lambda x: eager(x).square().mean(), eager, x)))


@torch.library.custom_op("test_host_copies::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Like memory-efficient attention's seed, the factor is on the host, and the fake kernel says otherwise."""
    factor = torch.tensor(2.0)
    return x * factor.item(), factor


@scaled.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(())


def _keep_factor(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1])


def _scaled_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
    (factor,) = ctx.saved_tensors
    return gradient * factor


scaled.register_autograd(_scaled_backward, setup_context=_keep_factor)


class Scaled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(scaled(x)[0])


def test_numbers_stay() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Scaled() for _ in range(6))).cuda()
    eager, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, device="cuda")

    loss_of = _checkpointed(model, torch.ops.test_host_copies.scaled.default, torch.ops.aten.tanh.default)
    compiled = torch.compile(loss_of, backend="roundpipe_fx", fullgraph=True, dynamic=False)
    found = _steps(compiled, model, x)
    assert all(map(torch.equal, found, _steps(lambda x: eager(x).square().mean(), eager, x)))


class Divided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x).reshape(4, -1, WIDTH)).reshape(-1, WIDTH)


def test_values_leave_whose_size_is_a_quotient() -> None:
    """Their strides say that it may be 0."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager, model = Selective(None), Selective("MUST_CPU_OFFLOAD")
    eager.layers = nn.ModuleList(Divided() for _ in range(LAYERS))
    model.layers = copy.deepcopy(eager.layers)
    eager, model = eager.cuda(), model.cuda()
    compiled = roundpipe_fx.compile(model, fullgraph=True, dynamic=True)
    for rows in (ROWS, ROWS // 4, 4):
        x = torch.randn(rows, WIDTH, device="cuda")
        assert all(map(torch.equal, _steps(compiled, model, x), _steps(eager, eager, x)))
        assert compiled.plan.sources()["program.py"].count("ao.offload") >= LAYERS - 2


def test_values_leave_where_that_saves_recomputation() -> None:
    """Nobody has asked for it: a budget is kept with less recomputation, and so is the least that can be met."""
    torch.manual_seed(0)
    eager, x = Selective(None).cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    expected = _steps(eager, eager, x)

    def planned(budget: Any, **options: Any) -> tuple[Any, nn.Module, nn.Module]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Selective(None).cuda()
        compiled = roundpipe_fx.compile(model, memory_budget=budget, tiling="never", dynamic=False, **options)
        return compiled.trace(x), model, compiled

    budget = planned(1.0)[0].peak_bytes * 6 // 10
    without, *_ = planned(budget, host_budget=0)
    plan, model, compiled = planned(budget)
    assert without.recompute_seconds > plan.recompute_seconds and plan.on_host and not without.on_host
    assert all(map(torch.equal, _steps(compiled, model, x, again=True), expected))
    model.zero_grad()
    with roundpipe_fx.measure_peak("cuda") as peak:
        compiled(x).backward()
    assert peak.bytes <= plan.peak_bytes <= budget
    assert not planned(budget, host_budget=2)[0].on_host  # every value is larger
    again, *_ = planned(budget)  # from the cache
    assert again.on_host == plan.on_host and again.peak_bytes == plan.peak_bytes
    with pytest.raises(roundpipe_fx.InfeasibleBudgetError) as refused:
        planned(1)
    plan, model, compiled = planned(refused.value.minimum)
    assert all(map(torch.equal, _steps(compiled, model, x), expected))
