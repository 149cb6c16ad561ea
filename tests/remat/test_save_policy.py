"""The mechanics of rematerialization, for any set of values that may be kept: property tests over random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import roundpipe_fx
from roundpipe_fx.codegen import emit_backward_program, emit_forward_program
from roundpipe_fx.compiler.setting import Setting
from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase, input_nodes, node_outputs, saved_values
from roundpipe_fx.remat.save_policy import recompute_unsaved, save_all, save_stage_inputs
from roundpipe_fx.runtime.executor import load_program
from roundpipe_fx.runtime.stage_compiler import compile_stages
from tests import listed
from tests.capturing import capture_joint, example_inputs, run_joint
from tests.comparison import aot_eager_step, assert_bitwise, compiled_step
from tests.golden_models import DropoutMLP, TiedTransformer

OPERATIONS = ("linear", "gelu", "dropout", "add", "norm", "split", "route", "scale")


class RandomModel(nn.Module):
    """A chain of operations in which some read a value from further back."""

    def __init__(self, operations: list[tuple[str, int]]) -> None:
        super().__init__()
        self.operations = operations
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4) * 0.5) for _ in operations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x]
        for (operation, back), weight in zip(self.operations, self.weights, strict=True):
            y, other = values[-1], values[max(len(values) - 1 - back, 0)]
            if operation == "linear":
                y = y @ weight
            elif operation == "gelu":
                y = nn.functional.gelu(y)
            elif operation == "dropout":
                y = nn.functional.dropout(y, 0.3, self.training)
            elif operation == "add":
                y = y + other
            elif operation == "norm":
                y = nn.functional.layer_norm(y, (4,))
            elif operation == "split":
                left, right = y.split(2, dim=1)
                y = torch.cat([right * other[:, :2], left], dim=1)
            elif operation == "route":
                best, chosen = y.topk(2, dim=0)
                y = y.index_add(0, chosen[:, 0], best @ weight)
            else:
                y = y * weight.sum().tanh()
            values.append(y)
        return values[-1].square().mean()


operations = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 4)), min_size=1, max_size=10)
relaxed = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.long
@relaxed
@given(operations, st.integers(1, 4), st.sampled_from(["none", "full"]), st.integers(0, 3))
def test_random_models_have_the_bits_of_aot_eager(chain: list, stages: int, recompute: str, seed: int) -> None:
    import warnings

    torch._dynamo.reset()
    torch.manual_seed(seed)
    model, batch = RandomModel([("linear", 0), *chain]), {"x": torch.randn(5, 4)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="roundpipe_fx: stages=")
        step, _ = compiled_step(model, batch, seed=seed, stages=stages, recompute=recompute)
    assert_bitwise(step, aot_eager_step(model, batch, seed=seed))


def _staged(model: nn.Module, *inputs: Any, stages: int = 2) -> tuple[JointGraph, Setting]:
    return listed.staged(capture_joint(model, *inputs), stages)


def _run_programs(joint: JointGraph, setting: Setting, inputs: list[Any]) -> list[Any]:
    modules = listed.stage_modules(joint, setting)
    primals, tangents = inputs[: len(joint.primals)], inputs[len(joint.primals) :]
    with torch.no_grad():
        forward = emit_forward_program(joint, modules)
        results = load_program(forward, compile_stages(forward.calls, "eager", {}), strided=False)(list(primals))
        outputs, saved = results[: joint.num_forward_outputs], results[joint.num_forward_outputs :]
        backward = emit_backward_program(joint, modules)
        arguments = [*saved, *tangents]
        gradients = load_program(backward, compile_stages(backward.calls, "eager", {}), strided=False)(arguments)
        assert not arguments  # boxed
    return [*outputs, *gradients]


@relaxed
@given(st.data(), operations, st.integers(1, 3))
@pytest.mark.long
def test_any_set_of_kept_values_gives_the_same_bits(data: st.DataObject, chain: list, stages: int) -> None:
    torch.manual_seed(0)
    joint, setting = _staged(RandomModel([("linear", 0), *chain]), torch.randn(5, 4), stages=stages)
    inputs = example_inputs(joint)
    torch.manual_seed(1)
    expected = run_joint(joint, copy.deepcopy(inputs))
    values = [output for node in joint.in_phase(Phase.FORWARD) for output in node_outputs(node)]
    keep = {value for value in values if data.draw(st.booleans())}
    joint = listed.planned(joint, setting, recompute_unsaved(joint, keep), early=True)
    joint.graph.lint()
    torch.manual_seed(1)
    found = _run_programs(joint, setting, inputs)
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert (left is None and right is None) or torch.equal(left, right)


def test_full_keeps_what_enters_a_stage_and_what_is_hoisted() -> None:
    torch.manual_seed(0)
    joint, setting = _staged(RandomModel([("linear", 0), ("gelu", 0), ("route", 0)] * 3), torch.randn(5, 4), stages=3)
    entering = save_stage_inputs(joint)
    names = {node.name for node in entering}
    joint = listed.planned(joint, setting, recompute_unsaved(joint, entering))
    saved = [node for node in saved_values(joint) if node.op != "placeholder"]
    for node in saved:
        maker = node.args[0] if node.name not in names and isinstance(node.args[0], torch.fx.Node) else node
        assert node.name in names or Mark.MUST_SAVE in maker.meta, node
    assert any(Mark.ORIGIN in node.meta for node in joint.computed())
    for node in joint.computed():  # nothing that is hoisted runs again
        assert not (Mark.ORIGIN in node.meta and Mark.MUST_SAVE in node.meta)


def test_none_repeats_only_views() -> None:
    joint, setting = _staged(TiedTransformer(), torch.randint(16, (2, 4)), torch.randint(16, (2, 4)))
    joint = listed.planned(joint, setting, recompute_unsaved(joint, save_all(joint)))
    assert all(node.meta[Mark.SECONDS] == 0 for node in joint.computed() if Mark.ORIGIN in node.meta)


def test_phases_depend_on_each_other_in_order() -> None:
    joint, setting = _staged(TiedTransformer(), torch.randint(16, (2, 4)), torch.randint(16, (2, 4)))
    joint = listed.planned(joint, setting, recompute_unsaved(joint, save_stage_inputs(joint)), early=True)
    tangents = set(joint.tangents)
    for node in joint.in_phase(Phase.RECOMPUTE):
        for source in input_nodes(node):
            assert source not in tangents
            assert source.op == "placeholder" or source.meta[Mark.PHASE] is not Phase.BACKWARD


def test_replayed_dropout_leaves_the_generator_alone() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    loss = compiled(torch.randn(4, 8))
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert sum(len(stage.replayed) for stage in compiled.plan.stages) == 2
