"""Bad input and odd use."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundpipe_fx
from roundpipe_fx.torch_private import dynamo_flags, flags
from tests.comparison import assert_bitwise, train_step
from tests.golden_models import DropoutMLP, MixtureOfExperts, TiedTransformer, UNet


class Branching(nn.Module):
    """Cannot be one graph: Python decides by a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum() > 0:  # the line that breaks
            x = x + 1
        return self.second(x).sum()


def _linear_chain(depth: int = 3, width: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


def test_untraceable_model_with_fullgraph_names_the_line() -> None:
    compiled = roundpipe_fx.compile(Branching(), fullgraph=True)
    with pytest.raises(Exception, match=r"test_odd_use\.py") as raised:
        compiled(torch.randn(2, 4))
    assert "if x.sum() > 0:  # the line that breaks" in str(raised.value)


def test_graph_break_warns_once_and_stays_right() -> None:
    model = Branching()
    reference = copy.deepcopy(model)
    compiled = roundpipe_fx.compile(model, recompute="full")
    x = torch.randn(2, 4)
    with pytest.warns(roundpipe_fx.GraphBreakWarning, match=r"test_odd_use.py:\d+ in forward") as caught:
        compiled(x).backward()
        model.zero_grad()
        compiled(x).backward()
    assert len([w for w in caught if w.category is roundpipe_fx.GraphBreakWarning]) == 1
    reference(x).backward()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    assert len(compiled.plans) == 2


def test_dynamo_flags_are_restored() -> None:
    config = torch._dynamo.config
    before = {name: getattr(config, name) for name in ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")}
    assert before == {"capture_scalar_outputs": False, "capture_dynamic_output_shape_ops": False}
    roundpipe_fx.compile(MixtureOfExperts(), fullgraph=True)(torch.randn(6, 8)).backward()
    assert before == {name: getattr(config, name) for name in before}
    with pytest.raises(torch._dynamo.exc.Unsupported):
        roundpipe_fx.compile(Branching(), fullgraph=True)(torch.randn(2, 4))
    assert before == {name: getattr(config, name) for name in before}


def test_dynamo_flags_may_be_nested() -> None:
    config = torch._dynamo.config
    with dynamo_flags():
        with dynamo_flags():
            assert config.capture_scalar_outputs
        assert config.capture_scalar_outputs, "the inner end is not the outer's"
        with pytest.raises(ZeroDivisionError), dynamo_flags():
            _ = 1 / 0
        assert config.capture_scalar_outputs
    assert not config.capture_scalar_outputs
    with pytest.raises(ZeroDivisionError), dynamo_flags():
        _ = 1 / 0
    assert not config.capture_scalar_outputs
    with dynamo_flags():
        assert config.capture_scalar_outputs


class Swept(nn.Module):
    """Its class is compiled again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh().sum()


def test_a_class_may_be_compiled_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo counts compilations by function, and runs it eagerly from some number on."""
    monkeypatch.setattr(flags, "_MOST_COMPILATIONS", 24)
    flags._setter.cache_clear()
    x = torch.randn(2, 4)
    used = [roundpipe_fx.compile(Swept(), memory_budget=1.0) for _ in range(2)]
    for _ in range(20):
        compiled = roundpipe_fx.compile(Swept(), memory_budget=1.0)
        for model in (compiled, *used):
            model(x).backward()
        assert len(compiled.plans) == 1
        roundpipe_fx.plan(Swept(), x, memory_budget=1.0, device="cpu")
    flags._setter.cache_clear()
    assert all(len(model.plans) < 5 for model in used), "models in use are seldom compiled again"


def test_a_compiled_model_ends_with_its_last_reference() -> None:
    compiled = roundpipe_fx.compile(Swept())
    compiled(torch.randn(2, 4)).backward()
    alive = weakref.ref(compiled)
    gc.disable()
    try:
        del compiled
        assert alive() is None
    finally:
        gc.enable()


def test_forward_may_be_replaced() -> None:
    """As accelerate does for mixed precision."""
    model, x = Swept(), torch.randn(2, 4)
    compiled = roundpipe_fx.compile(model)
    own = compiled.forward
    compiled.forward = lambda x: 2 * own(x)
    assert torch.equal(compiled(x), 2 * model(x))
    assert inspect.signature(own) == inspect.signature(model.forward)


def test_compiling_a_model_anew_leaves_others_of_its_class_alone() -> None:
    x = torch.randn(2, 4)
    first, second = (roundpipe_fx.compile(Swept(), memory_budget=1.0) for _ in range(2))
    for _ in range(3):
        for model in (first, second):
            model(x).backward()
        second._assumptions.stale = True
    assert (len(first.plans), len(second.plans)) == (1, 3)


def test_nothing_requires_grad() -> None:
    model = _linear_chain().requires_grad_(False)
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    x = torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))
    assert not compiled(x).requires_grad
    assert not compiled.plan.training


def test_only_the_input_requires_grad() -> None:
    model = _linear_chain().requires_grad_(False)
    x = torch.randn(2, 4, requires_grad=True)
    roundpipe_fx.compile(model, stages=2, recompute="full")(x).sum().backward()
    found, x.grad = x.grad, None
    model(x).sum().backward()
    assert torch.equal(found, x.grad)


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_frozen_but_for_adapters(recompute: str) -> None:
    model = nn.Sequential(*(LoRA(nn.Linear(4, 4)) for _ in range(3)))
    x = torch.randn(2, 4)
    expected = train_step(lambda x: model(x).square().sum(), model, {"x": x})
    compiled = roundpipe_fx.compile(model, stages=2, recompute=recompute, fullgraph=True)
    assert_bitwise(train_step(lambda x: compiled(x).square().sum(), model, {"x": x}), expected)
    assert all(layer.base.weight.grad is None for layer in model)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backward_twice(recompute: str) -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute=recompute)
    loss = compiled(torch.randn(4, 8))
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    for grad, first in zip((p.grad for p in model.parameters()), once, strict=True):
        assert torch.equal(grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_double_backward_is_a_clear_error() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    out = roundpipe_fx.compile(_linear_chain())(x).square().sum()
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, bad: bool = False) -> torch.Tensor:
        if bad:
            raise KeyError("the model's own error")
        return self.layer(x)


def test_exception_inside_the_model() -> None:
    compiled = roundpipe_fx.compile(Raising())
    with pytest.raises(KeyError, match="the model's own error"):
        compiled(torch.randn(2, 4), bad=True)
    assert compiled(torch.randn(2, 4)).shape == (2, 4)


def test_exception_of_an_operation_at_run_time() -> None:
    class Indexing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.table(index).sum()

    compiled = roundpipe_fx.compile(Indexing(), recompute="full")
    compiled(torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 9]))
    compiled(torch.tensor([1, 3])).backward()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recompute": "half"}, ValueError, "'none', 'full'"),
        ({"stages": 0}, ValueError, "at least one"),
        ({"stages": "many"}, ValueError, "'auto'"),
        ({"stages": 2.5}, TypeError, "positive int, 'auto', or a list"),
        ({"stages": True}, TypeError, "not a bool"),
        ({"stage_compiler": "nvcc"}, ValueError, "'eager', 'inductor'"),
    ],
)
def test_unknown_values(options: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        roundpipe_fx.compile(_linear_chain(), **options)


def test_unknown_names() -> None:
    with pytest.raises(TypeError, match="stagess"):
        roundpipe_fx.compile(_linear_chain(), stagess=2)
    step = torch.compile(_linear_chain(), backend="roundpipe_fx", options={"stagess": 2})
    with pytest.raises(Exception, match=r"unknown option 'stagess'. Did you mean 'stages'\? Valid options: stages"):
        step(torch.randn(2, 4))


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module"):
        roundpipe_fx.compile(lambda x: x)


def test_more_stages_than_segments_are_clamped() -> None:
    compiled = roundpipe_fx.compile(_linear_chain(3), stages=50)
    with pytest.warns(UserWarning, match=r"stages=50 is more than the \d segments"):
        compiled(torch.randn(2, 4))
    assert 1 < len(compiled.plan.stages) <= 4


def test_split_name_that_does_not_exist() -> None:
    compiled = roundpipe_fx.compile(TiedTransformer(), stages=["block.1"])
    tokens = torch.randint(16, (2, 4))
    with pytest.raises(Exception, match=r"no module named 'block.1'.*'blocks.1'"):
        compiled(tokens, tokens)


def test_split_names_begin_stages() -> None:
    compiled = roundpipe_fx.compile(TiedTransformer(depth=3), stages=["blocks.1", "blocks.2.mlp"])
    tokens = torch.randint(16, (2, 4))
    plan = compiled.trace(tokens, tokens)
    assert [stage.modules.split(" … ")[0] for stage in plan.stages] == ["embedding", "blocks.1.norm1", "blocks.2.mlp.0"]


def test_inputs_on_the_wrong_device() -> None:
    compiled = roundpipe_fx.compile(_linear_chain())
    compiled(torch.randn(2, 4))
    with pytest.raises(RuntimeError, match=r"two (different )?devices,? meta"):
        compiled(torch.randn(2, 4, device="meta"))
    assert compiled(torch.randn(2, 4)).device.type == "cpu"


def test_empty_batch() -> None:
    model = _linear_chain()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    out = compiled(torch.randn(0, 4))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert all(not p.grad.any() for p in model.parameters())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, pair: dict, *, scale: float = 1.0, flag: str = "a", more: list | None = None) -> dict:
        x, y = pair["both"]
        out = self.layer(x) * scale + self.layer(y)
        if more is not None:
            out = out + more[0]
        return {"out": out, "nested": (out.sum(), [flag, None, 3]), "input": x}


def test_nested_and_keyword_inputs_and_outputs() -> None:
    model = Nested()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    for keywords in ({}, {"scale": 2.0, "flag": "b"}, {"more": [y]}):
        found, expected = compiled({"both": (x, y)}, **keywords), model({"both": (x, y)}, **keywords)
        assert torch.equal(found["out"], expected["out"]) and torch.equal(found["nested"][0], expected["nested"][0])
        assert found["nested"][1] == expected["nested"][1] and found["input"] is x


def test_input_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.first(x * 1.5))
            x.mul_(2)
            return self.second(hidden * x).sum()

    for recompute in ("none", "full"):
        torch._dynamo.reset()
        model = InPlace()
        x, y = torch.ones(2, 4), torch.ones(2, 4)
        step = train_step(roundpipe_fx.compile(model, stages=2, recompute=recompute, fullgraph=True), model, {"x": x})
        reference = copy.deepcopy(model)
        compiled = torch.compile(reference, backend="aot_eager")
        assert_bitwise(step, train_step(compiled, reference, {"x": y}))
        assert torch.equal(x, y) and torch.equal(x, torch.full((2, 4), 2.0))


def test_saved_input_changed_before_backward_is_an_error() -> None:
    model = _linear_chain()
    for recompute in ("none", "full"):
        torch._dynamo.reset()
        x = torch.randn(2, 4)
        out = roundpipe_fx.compile(model, stages=2, recompute=recompute)(x).sum()
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_grad_scaler() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(torch.randn(4, 8))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_hooks() -> None:
    model = _linear_chain()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    x = torch.randn(2, 4)
    plain = compiled(x)
    seen: list[str] = []
    compiled.register_forward_pre_hook(lambda *_: seen.append("pre"))
    compiled.register_forward_hook(lambda *_: seen.append("post"))
    model[1].register_forward_hook(lambda module, args, out: out * 2)
    doubled = compiled(x)
    assert seen == ["pre", "post"]
    assert not torch.equal(doubled, plain) and torch.equal(doubled, model(x))
    model[0].weight.register_hook(lambda grad: grad * 3)
    compiled(x).sum().backward()
    found = model[0].weight.grad.clone()
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(found, model[0].weight.grad)


def test_full_backward_hook() -> None:
    model = _linear_chain()
    seen: list[torch.Size] = []
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out[0].shape))
    x = torch.randn(2, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        roundpipe_fx.compile(model, stages=2, recompute="full")(x).sum().backward()
    assert seen == [torch.Size([2, 4])]


def test_state_dict_round_trip() -> None:
    model = UNet()
    compiled = roundpipe_fx.compile(model)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert [id(p) for p in compiled.parameters()] == [id(p) for p in model.parameters()]
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in model.named_parameters()]
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)
    buffer.seek(0)
    other = roundpipe_fx.compile(UNet())
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert not torch.equal(other.eval()(x), compiled.eval()(x))
        other.load_state_dict(torch.load(buffer))
        assert torch.equal(other(x), compiled(x))


def test_deepcopy_and_pickle() -> None:
    compiled = roundpipe_fx.compile(DropoutMLP(), stages=2, recompute="full")
    x = torch.randn(4, 8)
    compiled(x).backward()
    for twin in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert not set(map(id, twin.parameters())) & set(map(id, compiled.parameters()))
        for both in (twin, compiled):
            both.zero_grad()
            torch.manual_seed(1)
            both(x).backward()
        for left, right in zip(twin.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(left.grad, right.grad)
        assert len(twin.plan.stages) == 2


def test_modes_devices_and_signature() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2)
    x = torch.randn(4, 8)
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert compiled.training and model.training
    assert compiled.eval() is compiled and not model.training and not model.layers[0][2].training
    assert torch.equal(compiled(x), model(x)) and not compiled.train().eval().training
    compiled.double()
    assert model.layers[0][0].weight.dtype is torch.float64 and compiled(x.double()).dtype is torch.float64
    compiled.train()
    assert model.training
    compiled.extra = 3
    assert model.extra == 3 and compiled.extra == 3
    with pytest.raises(AttributeError, match="absent"):
        _ = compiled.absent


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_saves_nothing(context) -> None:
    model = TiedTransformer().eval()
    compiled = roundpipe_fx.compile(model, stages=2, fullgraph=True)
    tokens = torch.randint(16, (2, 4))
    with context():
        assert torch.equal(compiled(tokens, tokens), model(tokens, tokens))
    assert not compiled.plan.training and compiled.plan.saved_bytes == 0 and len(compiled.plan.stages) == 2
    assert set(compiled.plan.sources()) == {"program.py", "stage_0.forward.py", "stage_1.forward.py"}


def test_shape_changes_recompile() -> None:
    model = DropoutMLP()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full", fullgraph=True)
    for batch in (4, 6, 9, 4):
        x = torch.randn(batch, 8)
        reference = copy.deepcopy(model)
        expected = train_step(torch.compile(reference, backend="aot_eager"), reference, {"x": x})
        assert_bitwise(train_step(compiled, model, {"x": x}), expected)
    assert 2 <= len(compiled.plans) <= 3


def test_dynamic_shapes() -> None:
    model = TiedTransformer()
    compiled = roundpipe_fx.compile(model, stages=3, recompute="full", fullgraph=True, dynamic=True)
    for length in (3, 5, 7):
        tokens = torch.randint(16, (2, length))
        reference = copy.deepcopy(model)
        run = torch.compile(reference, backend="aot_eager", dynamic=True)
        batch = {"tokens": tokens, "targets": tokens}
        assert_bitwise(train_step(compiled, model, batch), train_step(run, reference, batch))
    assert len(compiled.plans) == 1


def test_trace_runs_nothing() -> None:
    model = UNet()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=r"model.trace"):
        _ = compiled.plan
    plan = compiled.trace(torch.randn(2, 3, 8, 8))
    assert plan is compiled.plan and len(plan.stages) == 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(compiled.plans) == 1
    torch.set_rng_state(state)
    compiled(torch.randn(2, 3, 8, 8))
    assert len(compiled.plans) == 1


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


def test_optimizer_trains() -> None:
    model = TiedTransformer()
    compiled = roundpipe_fx.compile(model, stages=2, recompute="full")
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    tokens = torch.randint(16, (4, 6))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = compiled(tokens, tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_unused_dropout_draws_too() -> None:
    """Generators advance as in aot_eager even where a random result is thrown away."""

    class Wasteful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            F.dropout(x, 0.5)
            return F.dropout(self.layer(x), 0.5).sum()

    model, x = Wasteful(), torch.randn(4, 8)
    reference = copy.deepcopy(model)
    expected = train_step(torch.compile(reference, backend="aot_eager"), reference, {"x": x})
    assert_bitwise(train_step(roundpipe_fx.compile(model, recompute="full"), model, {"x": x}), expected)


class _Named(nn.Module):
    """Inputs called like what emitted text calls its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, args: torch.Tensor, streams: torch.Tensor, torch: torch.Tensor) -> torch.Tensor:
        return (self.layer(args).sin() * streams + torch).square().sum()


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"memory_budget": 0.0}, {"num_microbatches": 1}])
def test_inputs_may_be_called_anything(options: dict) -> None:
    model, inputs = _Named(), [torch.randn(2, 4) for _ in range(3)]
    expected = torch.autograd.grad(model(*inputs), list(model.parameters()))
    compiled = roundpipe_fx.compile(model, stages=1, **options)
    found = torch.autograd.grad(compiled(*inputs), list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    texts = {name: text for name, text in compiled.plan.sources().items() if name.endswith(".py")}
    assert texts
    for name, text in texts.items():
        compile(text, name, "exec")
