"""What a user may ask for, and what is said of what he may not."""

from __future__ import annotations

import copy
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import roundpipe_fx
from roundpipe_fx.torch_private import dynamo_flags
from tests.comparison import assert_bitwise, train_step
from tests.golden_models import MixtureOfExperts, TiedTransformer
from tests.linear_chain import linear_chain


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recompute": "half"}, ValueError, "'none', 'full'"),
        ({"stages": 0}, ValueError, "at least one"),
        ({"stages": "many"}, ValueError, "'auto'"),
        ({"stages": 2.5}, TypeError, "positive int, 'auto', or a list"),
        ({"stages": True}, TypeError, "not a bool"),
        ({"outputs": "kept"}, ValueError, "'auto', 'held', 'dropped'"),
        ({"outputs": "dropped", "num_microbatches": 2}, ValueError, "is for one device"),
        ({"stage_compiler": "nvcc"}, ValueError, "'eager', 'inductor'"),
        ({"inductor_options": {"max_autotun": True}}, ValueError, "Did you mean 'max_autotune'?"),
        ({"inductor_options": {"fallback_random": False}}, ValueError, "always on"),
        ({"inductor_options": {"triton.cudagraphs": True}}, ValueError, "a captured CUDA graph keeps the memory"),
        ({"inductor_options": "max_autotune"}, TypeError, "a mapping of names"),
        ({"inductor_options": {"max_autotune": True}, "stage_compiler": "eager"}, ValueError, "contradict"),
    ],
)
def test_unknown_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        roundpipe_fx.compile(linear_chain(), **options)


def test_a_plan_for_several_devices_refuses_what_their_compilation_does() -> None:
    for outputs in ("dropped", "unread"):
        with pytest.raises(ValueError, match=f"outputs='{outputs}' is for one device"):
            roundpipe_fx.plan(linear_chain(), torch.randn(2, 4), outputs=outputs, devices=2)
    with pytest.raises(ValueError, match=r"outputs='dropped' is for one device.*Give outputs='unread'"):
        roundpipe_fx.compile(linear_chain(), num_microbatches=2, outputs="dropped")


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match=r"keyword argument 'memory_bugdet'\. Did you mean 'memory_budget'\?"):
        roundpipe_fx.compile(linear_chain(), memory_bugdet=2)
    with pytest.raises(TypeError, match=r"'stagess': neither it nor the model's forward.*Did you mean 'stages'\?"):
        roundpipe_fx.plan(linear_chain(), torch.randn(2, 4), stagess=2)
    step = torch.compile(linear_chain(), backend="roundpipe_fx", options={"stagess": 2})
    with pytest.raises(ValueError, match=r"^unknown option 'stagess'. Did you mean 'stages'\? Valid options: stages"):
        step(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("reduce-overhead", "^mode='reduce-overhead' is for Inductor alone: a captured CUDA graph keeps the memory"),
        ("max-autotune", "^mode='max-autotune' is for Inductor alone.*max_autotune"),
    ],
)
def test_modes_of_inductor_are_refused(mode: str, message: str) -> None:
    step = torch.compile(linear_chain(), backend="roundpipe_fx", mode=mode)
    with pytest.raises(ValueError, match=message):
        step(torch.randn(2, 4))


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        roundpipe_fx.compile(lambda x: x)


def test_more_stages_than_segments_are_clamped() -> None:
    compiled = roundpipe_fx.compile(linear_chain(3), stages=50)
    with pytest.warns(UserWarning, match=r"stages=50 is more than the \d segments"):
        compiled(torch.randn(2, 4))
    assert 1 < len(compiled.plan.stages) <= 4


def test_split_name_that_does_not_exist() -> None:
    compiled = roundpipe_fx.compile(TiedTransformer(), stages=["block.1"])
    tokens = torch.randint(16, (2, 4))
    with pytest.raises(ValueError, match=r"^stages: no module named 'block.1'.*'blocks.1'"):
        compiled(tokens, tokens)


class _Region(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with roundpipe_fx.memory_budget("7 apples"):
            return (x.sin() * x).sum()


def _chain(**options: Any) -> Callable[[torch.Tensor], Any]:
    return roundpipe_fx.compile(linear_chain(), **options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: _chain(stages=["9"]), ValueError, "stages: no module"),
        (lambda: _chain(memory_budget=1), roundpipe_fx.InfeasibleBudgetError, "memory_budget of 1 bytes"),
        (lambda: _chain(memory_budget=1, num_microbatches=2), ValueError, "memory_budget of 1 bytes"),
        (lambda: roundpipe_fx.compile(_Region()), ValueError, "memory_budget='7 apples' is not a size"),
        (
            lambda: torch.compile(linear_chain(), backend="roundpipe_fx", options={"stages": True}),
            TypeError,
            "stages must be",
        ),
    ],
    ids=["stage", "budget", "pipelined budget", "region", "backend"],
)
def test_errors_while_tracing_are_what_they_are(
    make: Callable[[], Callable[[torch.Tensor], Any]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}") as raised:
        make()(torch.randn(2, 4, requires_grad=True))
    assert not isinstance(raised.value, torch._dynamo.exc.BackendCompilerFailed)
    assert "TORCHDYNAMO" not in "".join(traceback.format_exception_only(raised.value))


def test_a_stage_may_begin_where_nothing_is_computed() -> None:
    """At dropout in evaluation and at the identity: where the next module of the sequence begins."""
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Identity())
    model = torch.nn.Sequential(inner, torch.nn.Dropout(0.5), torch.nn.Linear(4, 4), torch.nn.Identity()).eval()
    for name in ("0.1", "1", "2"):
        plan = roundpipe_fx.compile(model, stages=[name]).trace(torch.randn(2, 4))
        first, last = (stage.modules for stage in plan.stages)
        assert first.startswith("0.0")
        assert last.endswith("2")
    with pytest.raises(ValueError, match="the module '3' has no operations in this model's forward"):
        roundpipe_fx.compile(model, stages=["3"])(torch.randn(2, 4))


def test_split_names_begin_stages() -> None:
    compiled = roundpipe_fx.compile(TiedTransformer(depth=3), stages=["blocks.1", "blocks.2.mlp"])
    tokens = torch.randint(16, (2, 4))
    plan = compiled.trace(tokens, tokens)
    assert [stage.modules.split(" … ")[0] for stage in plan.stages] == ["embedding", "blocks.1.norm1", "blocks.2.mlp.0"]


@pytest.mark.long
def test_front_door_of_torch_compile() -> None:
    """Found by name, with data-dependent shapes in one graph, flags restored."""
    model = MixtureOfExperts()
    x = torch.randn(6, 8)
    reference = copy.deepcopy(model)
    with dynamo_flags():
        expected = train_step(torch.compile(reference, backend="aot_eager", fullgraph=True), reference, {"x": x})
    for fullgraph in (True, False):
        torch._dynamo.reset()
        options = {"stages": 2, "recompute": "full"}
        step = torch.compile(model, backend="roundpipe_fx", options=options, fullgraph=fullgraph)
        assert_bitwise(train_step(step, model, {"x": x}), expected)
        assert not torch._dynamo.config.capture_dynamic_output_shape_ops


@pytest.mark.long
def test_found_without_an_import(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # a file of its own: Dynamo does not trace code that has none
    script.write_text(
        "import torch\n"
        "f = torch.compile(lambda x: (x[x > 0] * 2).sum(), backend='roundpipe_fx', fullgraph=True)\n"
        "x = torch.tensor([1., -1., 3.], requires_grad=True)\n"
        "f(x).backward()\n"
        "assert x.grad.tolist() == [2., 0., 2.], x.grad\n"
    )
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=300)
