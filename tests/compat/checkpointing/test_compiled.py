"""Each interface, eager and compiled: the same small model written with it and without it has the same gradients."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import roundpipe_fx
from roundpipe_fx.ir.recompute_marks import RecomputeDataError
from roundpipe_fx.report.peak_memory import measure_peak
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step, train_step
from tests.compat.checkpointing.models import (
    BATCH,
    INTERFACES,
    WIDTH,
    Checkpointed,
    Model,
    Nested,
    NoisyWeights,
    Routed,
    ScopedLayers,
    Selective,
    WithoutGeneratorState,
    aten,
    eager_step,
)
from tests.counting import count_operations


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.quick_every(8)
def test_eager_with_it_eager_without_it_and_compiled_have_the_same_bits(interface: type[Model]) -> None:
    reference = eager_step(interface(plain=True))
    if interface is not WithoutGeneratorState:  # which eager torch.utils.checkpoint gives other random numbers
        assert_bitwise(eager_step(interface()), reference)
    settings: list[dict[str, Any]] = [
        {},
        {"recompute": "full", "stages": 3},
        {"memory_budget": 0.4, "stages": 2},
    ]
    for setting in settings:
        torch._dynamo.reset()
        step, _ = compiled_step(interface(), BATCH, **setting)
        assert_bitwise(step, reference)


@pytest.mark.parametrize("interface", [Checkpointed, Nested, Routed, NoisyWeights])
def test_behind_torch_compile_too(interface: type[Model]) -> None:
    reference = eager_step(interface(plain=True))
    model = interface()
    compiled = torch.compile(model, backend="roundpipe_fx", fullgraph=True)
    assert_bitwise(train_step(compiled, model, BATCH), reference)


def kept_and_again(model: Model, **options: Any) -> tuple[set[str], set[str], roundpipe_fx.Plan]:
    """Operators of values that the compiled forward keeps, and of those that its backward makes again."""
    torch._dynamo.reset()
    _, compiled = compiled_step(model, BATCH, **options)
    stages = compiled.plan.stages
    kept = {re.sub(r"_\d+", "", value.name) for stage in stages for value in (*stage.saved, *stage.hoisted)}
    again = {re.sub(r"_\d+", "", value.name) for stage in stages for value in stage.recomputed}
    return kept, again, compiled.plan


def simulate_step_peak(run: Callable[..., Any], model: nn.Module, batch: dict[str, Any]) -> int:
    train_step(run, model, batch)
    model.zero_grad(set_to_none=True)
    with measure_peak("cpu") as peak:
        run(**batch).backward()
    return peak.bytes


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"memory_budget": 1.0}, {"memory_budget": "1 GiB"}])
def test_what_checkpoints_make_is_not_kept(options: dict[str, Any]) -> None:
    kept, again, _ = kept_and_again(Checkpointed(), **options)
    assert again >= {"gelu", "addmm"}
    assert kept <= {"add", "bernoulli_p_rng_state", "getitem"} and not kept & {"gelu", "addmm"}


def test_a_plan_says_why_a_value_is_made_again() -> None:
    _, _, plan = kept_and_again(Checkpointed())
    assert "but it must not be saved: computed in a checkpoint" in plan.explain("gelu")
    assert "computed in a checkpoint" in plan.details()
    assert roundpipe_fx.Plan.from_json(plan.to_json()) == plan
    _, _, plan = kept_and_again(NoisyWeights())
    assert "computed in a gradient checkpoint scope" in plan.details()


def test_memory_of_a_compiled_checkpointed_model() -> None:
    batch = {"x": torch.randn(2048, WIDTH)}
    for interface in (Checkpointed, Nested, ScopedLayers):
        torch._dynamo.reset()
        model = interface(depth=4)
        eager = simulate_step_peak(model, model, batch)
        plain = simulate_step_peak(Model(depth=4), model, batch)
        compiled = roundpipe_fx.compile(model)
        ours = simulate_step_peak(compiled, model, batch)
        assert ours <= compiled.plan.peak_bytes
        assert ours <= eager < plain, interface


def test_inner_checkpoints_are_recomputed_within_outer_ones() -> None:
    _, _, plan = kept_and_again(Nested())
    times = [value.times for stage in plan.stages for value in stage.recomputed if value.name.startswith("addmm")]
    assert max(times) == 2  # once for the outer checkpoint, once for itself
    _, _, plan = kept_and_again(Checkpointed())
    assert {value.times for stage in plan.stages for value in stage.recomputed} == {1}


@pytest.mark.parametrize("name", ["MUST_SAVE", "PREFER_SAVE", "MUST_CPU_OFFLOAD", "PREFER_CPU_OFFLOAD"])
def test_selective_policies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = getattr(CheckpointPolicy, name, None)
    if named is None:
        pytest.skip("a later version of PyTorch has it")
    monkeypatch.setattr(Selective, "named", named)
    kept, again, plan = kept_and_again(Selective())
    assert "addmm" in kept and "addmm" not in again and "gelu" in again
    hoisted = {value.reason for stage in plan.stages for value in stage.hoisted}
    reasons = {
        "MUST_SAVE": {"its checkpoint's policy must save it"},
        "MUST_CPU_OFFLOAD": {"its checkpoint's policy must offload it"},
    }
    assert hoisted == reasons.get(name, set())
    kept, again, _ = kept_and_again(Selective(), memory_budget=0.0)
    # Where memory is short, what a policy only prefers gives way.
    assert ("addmm" in again) == name.startswith("PREFER")


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"memory_budget": 0.0}], ids=["", "full", "least"])
def test_values_of_a_selection_may_be_saved(options: dict[str, Any]) -> None:
    """Without a policy, only indices are, and values are gathered."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers, x = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3)), torch.randn(16, 8)

    def layer(index: int, x: torch.Tensor) -> torch.Tensor:
        values, indices = x.topk(4, -1)
        return layers[index](x) + torch.zeros_like(x).scatter(1, indices, values.sin())

    def chosen(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator is torch.ops.aten.topk.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)

    def loss(x: torch.Tensor) -> torch.Tensor:
        for index in range(3):
            x = torch.utils.checkpoint.checkpoint(layer, index, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    expected = torch.autograd.grad(loss(x), [*layers.parameters()])
    compiled = torch.compile(loss, backend="roundpipe_fx", fullgraph=True, options=options)
    assert all(map(torch.equal, torch.autograd.grad(compiled(x), [*layers.parameters()]), expected))


def test_must_save_does_not_run_again() -> None:
    for interface, expected in ((Selective, 0), (Checkpointed, 4)):
        torch._dynamo.reset()
        compiled = roundpipe_fx.compile(interface())
        compiled(**BATCH).backward()
        loss = compiled(**BATCH)
        with count_operations() as ran:
            loss.backward()
        assert ran[aten.addmm.default] + ran[aten.addmm.out] == expected  # the second of a layer is not needed


def test_no_generator_state_is_saved_where_a_checkpoint_says_so() -> None:
    torch._dynamo.reset()
    _, compiled = compiled_step(WithoutGeneratorState(), BATCH)
    assert not any("rng_state" in text for text in compiled.plan.sources().values())
    torch._dynamo.reset()
    _, compiled = compiled_step(Checkpointed(), BATCH)
    assert any("rng_state" in text for text in compiled.plan.sources().values())


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"memory_budget": 0.0}])
def test_what_is_saved_for_recompute_is_not_made_again(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(Routed(), fullgraph=True, **options)
    loss = compiled(**BATCH)
    with count_operations() as ran:
        loss.backward()
    assert not [operator for operator in ran if "sort" in str(operator)]


class SavedFloats(Model):
    """Saves what neither routes nor asks: only the user knows that it is worth keeping."""

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if roundpipe_fx.doing_recompute():
            (scale,) = roundpipe_fx.get_recompute_data()
        else:
            scale = torch.linalg.matrix_norm(x.detach() @ x.detach().T)
            roundpipe_fx.save_for_recompute(scale)
        return x + self.layers[index](x / scale)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            x = roundpipe_fx.checkpoint(self.layer, index, x)
        return x


def test_saved_values_are_hoisted_with_the_reason() -> None:
    torch._dynamo.reset()
    step, compiled = compiled_step(SavedFloats(), BATCH)
    assert_bitwise(step, eager_step(SavedFloats()))
    hoisted = [value for stage in compiled.plan.stages for value in stage.hoisted]
    assert len(hoisted) == 4 and {value.reason for value in hoisted} == {"given to save_for_recompute"}
    assert "given to save_for_recompute" in compiled.plan.explain(hoisted[0].name)
    assert "save_for_recompute" not in "".join(compiled.plan.sources().values())


class SavedPair(SavedFloats):
    """Saves both results of one operation."""

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if roundpipe_fx.doing_recompute():
            variance, mean = roundpipe_fx.get_recompute_data()
        else:
            variance, mean = torch.var_mean(x.detach(), -1, keepdim=True)
            roundpipe_fx.save_for_recompute(variance, mean)
        return x + self.layers[index]((x - mean) / variance)


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"memory_budget": 0.0}])
def test_saved_results_of_one_operation_are_hoisted_with_it(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    step, compiled = compiled_step(SavedPair(), BATCH, **options)
    assert_bitwise(step, eager_step(SavedPair()))
    hoisted = [value for stage in compiled.plan.stages for value in stage.hoisted]
    assert {value.reason for value in hoisted} == {"given to save_for_recompute"}
    loss = compiled(**BATCH)
    with count_operations() as ran:
        loss.backward()
    assert not [operator for operator in ran if "var_mean" in str(operator)]


class HostSyncs(Model):
    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        rows = (x.detach().sum(-1) > 0).nonzero()[:, 0]
        return x.index_add(0, rows, self.layers[index](x[rows]))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.layers)):
            x = roundpipe_fx.checkpoint(self.layer, index, x)
        return x


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"memory_budget": 0.0}])
@pytest.mark.long
def test_host_syncs_inside_a_checkpoint_run_once(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    compiled = roundpipe_fx.compile(HostSyncs(), fullgraph=True, **options)
    loss = compiled(**BATCH)
    with roundpipe_fx.count_host_syncs() as syncs:
        loss.backward()
    assert syncs.total == 0
    assert_bitwise(train_step(compiled, compiled, BATCH), eager_step(HostSyncs()))


def test_scopes_are_not_kept_whatever_the_budget() -> None:
    for options in ({}, {"memory_budget": 1.0}, {"memory_budget": "1 GiB"}, {"recompute": "full"}):
        kept, again, _ = kept_and_again(NoisyWeights(), **options)
        assert "randn_like" in again and "randn_like" not in kept
        assert kept >= {"randn_like_rng_state"}
    kept, _, _ = kept_and_again(NoisyWeights(plain=True), memory_budget=1.0)
    assert "randn_like_rng_state" not in kept


@pytest.mark.long
def test_without_gradients() -> None:
    for interface in INTERFACES:
        torch._dynamo.reset()
        model = interface().eval()
        compiled = roundpipe_fx.compile(model, fullgraph=True)
        with torch.no_grad():
            torch.manual_seed(0)
            found = compiled(**BATCH)
            torch.manual_seed(0)
            assert torch.equal(found, model(**BATCH))


class Misused(Model):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        roundpipe_fx.save_for_recompute(x.detach().relu())
        if self.how == "twice":
            roundpipe_fx.save_for_recompute(x.detach().sin())
        if self.how == "requires grad":
            roundpipe_fx.save_for_recompute(self.layers[index](x))
        return super().layer(index, x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return roundpipe_fx.checkpoint(self.layer, 0, roundpipe_fx.checkpoint(self.layer, 1, x))


def test_misuse_is_an_error_that_names_the_layer() -> None:
    compiled_step(Misused("not"), BATCH)
    for how, message in (
        ("twice", r"second time in one forward of layer the model(.|\n)*test_compiled.py"),
        ("requires grad", r"in layer the model(.|\n)*of shape \(64, 16\) requires grad"),
    ):
        torch._dynamo.reset()
        with pytest.raises(RecomputeDataError, match=message):
            compiled_step(Misused(how), BATCH)
        torch._dynamo.reset()
        with torch.no_grad():
            roundpipe_fx.compile(Misused("requires grad"))(**BATCH)


class SavingLayer(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.linear = times, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            roundpipe_fx.save_for_recompute(x.detach().sum())
        return self.linear(x).relu()


def test_a_layer_outside_of_checkpoints_is_a_module_call() -> None:
    shared = SavingLayer(1)

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.other = shared, nn.Sequential(shared, SavingLayer(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = self.shared(x)
            return self.other(x)

    roundpipe_fx.compile(Calls(), fullgraph=True)(BATCH["x"]).sum().backward()  # each call saves once
    torch._dynamo.reset()
    with pytest.raises(RecomputeDataError, match=r"layer 1 \(SavingLayer\)"):
        roundpipe_fx.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), SavingLayer(2)))(BATCH["x"])


def test_recomputation_is_issued_before_the_gradient_can_be_consumed() -> None:
    """Two dependent stages: the recomputation of the first is called before the join that its backward waits at."""
    torch._dynamo.reset()
    _, compiled = compiled_step(Checkpointed(), BATCH, recompute="full", stages=2)
    backward = [program for program in compiled.plan.programs if "backward" in str(program.module.graph)][-1]
    order = [str(node.target) for node in backward.module.graph.nodes if node.op in ("call_module", "call_function")]
    recompute = next(i for i, name in enumerate(order) if "stage_0_recompute" in name)
    consume = next(i for i, name in enumerate(order) if "stage_0_backward" in name)
    joins = [i for i, name in enumerate(order) if "wait_event" in name or "join" in name]
    forks = [i for i, name in enumerate(order) if "fork" in name]
    assert any(fork < recompute for fork in forks)
    assert any(recompute < join < consume for join in joins)


@pytest.mark.long
def test_a_hugging_face_model_with_its_own_checkpointing() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, use_cache=False)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(64, (2, 24))
    batch = {"input_ids": tokens, "labels": tokens}
    reference = aot_eager_step(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for options in ({}, {"memory_budget": 0.3}):
        torch._dynamo.reset()
        step, compiled = compiled_step(model, batch, **options)
        assert_bitwise(step, reference)
        assert compiled.plan.recompute_seconds > 0.3 * compiled.plan.forward_seconds
        kept = [value for stage in compiled.plan.stages for value in stage.saved]
        assert not [value for value in kept if value.name.startswith(("addmm", "tanh", "native_layer_norm"))]


def test_debugging_a_checkpoint_changes_nothing_in_a_graph() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)

    class Net(nn.Module):
        def __init__(self, call: Callable[..., torch.Tensor], **options: Any) -> None:
            super().__init__()
            self.linear, self.call, self.options = copy.deepcopy(linear), call, options

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.call(lambda v: torch.tanh(self.linear(v)), x, **self.options).sum()

    gradients = []
    for call, options in (
        (roundpipe_fx.checkpoint, {}),
        (roundpipe_fx.checkpoint, {"debug": True}),
        (torch.utils.checkpoint.checkpoint, {"use_reentrant": False, "debug": True}),
    ):
        model = Net(call, **options)
        roundpipe_fx.compile(model)(x).backward()
        gradients.append(model.linear.weight.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
