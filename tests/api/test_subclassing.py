"""A compiled model is an instance of the model's own class, with the model's own attributes."""

from __future__ import annotations

import abc
import copy
import inspect
import io
import pickle
import warnings
from typing import Any, ClassVar

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call

import roundpipe_fx
from tests.linear_chain import linear_chain

X = torch.randn(3, 4)


class Named(nn.Module):
    """Has attributes that are called as those of a compiled module."""

    step = 7

    def __init__(self) -> None:
        super().__init__()
        self.trace = nn.Linear(4, 4)
        self.plans = ["mine"]

    def plan(self) -> str:
        return "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trace(x) * self.step * len(self.plan()) * len(self.plans)


class Slotted(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Forwarding(nn.Module):
    """Takes attributes that it does not have from the module within, and notes what is assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear_chain()
        self.assigned: list[str] = []

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "assigned" in vars(self):
            self.assigned.append(name)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


class Register(abc.ABCMeta):
    classes: ClassVar[list[str]] = []

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.made_by_register = True
        return made


class Registered(nn.Module, metaclass=Register):
    """Its subclasses must say what they are for."""

    def __init_subclass__(cls, *, purpose: str) -> None:
        Register.classes.append(purpose)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


MODELS = [linear_chain, Named, Forwarding, Registered, lambda: nn.Linear(4, 4)]


@pytest.mark.parametrize("make", MODELS)
def test_an_instance_that_trains_and_is_copied(make: Any) -> None:
    model = make()
    compiled = roundpipe_fx.compile(model, recompute="full")
    assert isinstance(compiled, type(model)) and isinstance(compiled, roundpipe_fx.CompiledModule)
    assert type(compiled).__name__ == type(model).__name__ and repr(compiled) == repr(model)
    gradients = []
    for module in (model, compiled):
        module(X).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
    assert len(roundpipe_fx.plans(compiled)) == 1 and not isinstance(model, roundpipe_fx.CompiledModule)
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    twins = (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled)), torch.load(buffer, weights_only=False))
    for twin in twins:
        assert type(twin) is type(compiled) and twin.state_dict().keys() == model.state_dict().keys()
        assert not set(map(id, twin.parameters())) & set(map(id, model.parameters()))
        assert torch.equal(twin(X), model(X)) and len(roundpipe_fx.plans(twin)) == 1
    shared = copy.copy(compiled)
    assert next(shared.parameters()) is next(model.parameters())


def test_attributes_are_the_models_now_and_later() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model)
    assert len(compiled) == len(model) and compiled[0] is model[0] and list(compiled) == list(model)
    compiled.extra = nn.Parameter(torch.ones(1))
    model.register_buffer("more", torch.ones(1))
    del compiled[1]
    compiled.eval()
    assert model.extra is compiled.extra and compiled.more is model.more
    assert len(model) == len(compiled) and not model.training
    assert torch.equal(compiled(X), model(X))


def test_an_attribute_called_like_one_of_ours_is_the_models() -> None:
    model = Named()
    compiled = roundpipe_fx.compile(model)
    assert compiled.plan() == "mine" and compiled.plans == ["mine"] and compiled.step == 7
    assert compiled.trace is model.trace
    compiled.step = 8
    assert model.step == 8
    assert torch.equal(compiled(X), model(X))
    (plan,) = roundpipe_fx.plans(compiled)
    assert roundpipe_fx.CompiledModule.trace(compiled, X) is plan


def test_slots_and_own_attribute_access() -> None:
    slotted = Slotted()
    compiled = roundpipe_fx.compile(slotted)
    compiled.scale = 3.0
    assert slotted.scale == 3.0 and torch.equal(compiled(X), slotted.layer(X) * 3)
    forwarding = Forwarding()
    compiled = roundpipe_fx.compile(forwarding)
    compiled.extra = 1
    assert forwarding.assigned == ["extra"] and compiled.append == forwarding.base.append
    registered = Registered()
    assert registered.made_by_register and roundpipe_fx.compile(registered).made_by_register
    assert not Register.classes


def test_hasattr_members_and_signatures() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            """The model's own."""
            return self.layer(x) * scale

    model = Model()
    compiled = roundpipe_fx.compile(model)
    assert not hasattr(compiled, "plan") and not hasattr(compiled, "nothing")
    with pytest.raises(RuntimeError, match=r"model\.trace"):
        _ = compiled.plan
    assert "plan" not in dict(inspect.getmembers(compiled))
    assert inspect.signature(compiled.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(compiled).forward) == inspect.signature(Model.forward)
    assert compiled.forward.__doc__ == "The model's own." and compiled.forward == compiled.forward
    compiled(X)
    assert compiled.plan is dict(inspect.getmembers(compiled))["plan"]


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 2}])
def test_hooks_run_once(options: Any) -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model, **options)
    seen: list[str] = []
    compiled.register_forward_pre_hook(lambda *_: seen.append("pre"))
    model.register_forward_hook(lambda *_: seen.append("post"))
    model.register_full_backward_hook(lambda *_: seen.append("back"))
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    assert seen == ["pre", "post", "back"]
    model(x).sum().backward()
    assert seen == ["pre", "post", "back"] * 2
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    del seen[:]
    try:
        compiled(x)
    finally:
        handle.remove()
    assert seen.count(type(model).__name__) == 1


def test_forward_is_replaced_on_the_compiled_model_alone() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model)
    own = compiled.forward
    compiled.forward = lambda x: own(x) + 1
    assert torch.equal(compiled(X), model(X) + 1)
    del compiled.forward
    assert torch.equal(compiled(X), model(X)) and len(compiled.plans) == 1
    compiled.forward = lambda x: model[0](x)
    with pytest.warns(UserWarning, match=r"was replaced by .*lambda.* runs eagerly"):
        assert torch.equal(compiled(X), model[0](X))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(X)  # told once
    patched = linear_chain()
    patched.forward = lambda x: torch.relu(patched[0](x))
    compiled = roundpipe_fx.compile(patched)
    assert torch.equal(compiled(X), patched(X)) and len(compiled.plans) == 1


def test_parts_of_a_container_are_eager() -> None:
    """A slice of a container is made by calling the class of the whole."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    compiled = roundpipe_fx.compile(model)
    part = compiled[:2]
    x = torch.randn(3, 4)
    assert type(part) is nn.Sequential and part[0] is model[0]
    assert torch.equal(part(x), model[:2](x))
    again = type(compiled)(nn.Linear(4, 1))
    assert type(again) is nn.Sequential and again(x).shape == (3, 1)
    compiled.append(nn.Tanh())
    assert len(model) == 4 and torch.equal(compiled(x), model(x))


def test_class_assignment_concerns_the_compiled_model_alone() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model)
    compiled.__class__ = type("Wrapped", (type(compiled),), {"extra": 5})
    assert compiled.extra == 5 and not hasattr(model, "extra") and torch.equal(compiled(X), model(X))
    with pytest.raises(TypeError, match="layout"):
        compiled.__class__ = nn.Sequential


def test_traced_by_others() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model)
    expected = model(X)
    assert torch.equal(torch.export.export(compiled, (X,)).module()(X), expected)
    assert torch.equal(fx.symbolic_trace(compiled)(X), expected)
    assert torch.equal(fx.symbolic_trace(nn.Sequential(compiled))(X), expected)
    assert torch.equal(torch.compile(nn.Sequential(compiled, nn.ReLU()), backend="aot_eager")(X), expected.relu())
    outer = roundpipe_fx.compile(nn.Sequential(compiled, nn.ReLU()), fullgraph=True)
    assert torch.equal(outer(X), expected.relu()) and len(outer.plans) == 1
    assert not compiled.plans
    assert torch.equal(torch.jit.trace(compiled, X)(X), expected)
    assert torch.equal(torch.jit.script(roundpipe_fx.compile(nn.Tanh()))(X), X.tanh())
    state = {name: value.detach() + 1 for name, value in model.named_parameters()}
    assert torch.equal(functional_call(compiled, state, (X,)), functional_call(model, state, (X,)))


def test_a_model_that_accelerate_offloads_is_refused() -> None:
    """Its weights get no gradients eagerly either. Without the hooks it is a model like any other."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), execution_device="cpu")
    model(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TypeError, match=r"accelerate's hooks bring in .* those of '0'.* devices=\['cuda:0'\]"):
        roundpipe_fx.compile(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    roundpipe_fx.compile(model)(torch.randn(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_is_compiled_already_is_refused() -> None:
    model = linear_chain()
    compiled = roundpipe_fx.compile(model)
    for again in (compiled, torch.compile(model, backend="eager")):
        with pytest.raises(TypeError, match="compiled already"):
            roundpipe_fx.compile(again)
    with pytest.raises(RuntimeError, match="compiled already"):
        compiled.compile()
    with pytest.raises(TypeError, match="ScriptModule"):
        roundpipe_fx.compile(torch.jit.trace(model, X))
    expected = model(X)
    model.compile(backend="eager")
    with pytest.raises(TypeError, match="compiled already"):
        roundpipe_fx.compile(model)
    assert torch.equal(compiled(X), expected) and len(compiled.plans) == 1


def test_a_part_with_options_of_its_own_keeps_them() -> None:
    """Others that compile a module around it run it as it is compiled; those that export the model do not."""
    compiled = roundpipe_fx.compile(linear_chain(), recompute="full")
    outer, expected = nn.Sequential(compiled, nn.ReLU()), nn.Sequential(compiled, nn.ReLU())(X)
    assert len(compiled.plans) == 1
    for backend in ("aot_eager", "roundpipe_fx"):
        torch._dynamo.reset()
        plans = len(compiled.plans)
        assert torch.equal(torch.compile(outer, backend=backend)(X), expected)
        assert len(compiled.plans) > plans and compiled.plan.recompute == "full"
    assert torch.equal(torch.export.export(outer, (X,)).module()(X), expected)
    assert torch.equal(torch.export.export(outer, (X,), strict=True).module()(X), expected)
    assert torch.equal(torch.jit.trace(outer, X)(X), expected)
    late = roundpipe_fx.compile(nn.Sequential(nn.Tanh(), nn.ReLU()))
    late[0] = compiled
    plans = len(compiled.plans)
    torch._dynamo.reset()
    with pytest.warns(roundpipe_fx.GraphBreakWarning):
        assert torch.equal(late(X), expected)
    assert len(compiled.plans) > plans


def test_parts_whose_options_would_be_dropped_are_refused() -> None:
    own = roundpipe_fx.compile(linear_chain(), recompute="full")
    in_place, wrapped = linear_chain(), torch.compile(linear_chain(), backend="eager")
    in_place.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
    piped = roundpipe_fx.compile(linear_chain(), num_microbatches=2)
    for part in (own, in_place, wrapped, piped):
        with pytest.raises(TypeError, match=r"^'0', a part of the model, is compiled already, by \w+\.compile"):
            roundpipe_fx.compile(nn.Sequential(part, nn.ReLU()))
    with pytest.raises(TypeError, match="'0', a part"):
        roundpipe_fx.compile(nn.Sequential(piped), num_microbatches=2)
    with pytest.raises(TypeError, match=r"^'0', a part of the model, is compiled in place"):
        torch.compile(nn.Sequential(in_place, nn.ReLU()), backend="roundpipe_fx")(X)


def test_another_backend_around_a_part_that_is_compiled_in_place_is_told_of() -> None:
    part = linear_chain()
    part.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
    outer = nn.Sequential(part, nn.ReLU())
    with pytest.warns(UserWarning, match=r"'0', a part of the model, is compiled in place .* drops the backend"):
        torch.compile(outer, backend="aot_eager")(X)
    assert not roundpipe_fx.plans(part)
    part = linear_chain()
    part.compile(backend="eager")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(nn.Sequential(part), backend="aot_eager")(X)


def test_a_class_that_allows_no_subclass() -> None:
    class Final(type(nn.Module)):
        def __new__(cls, name: str, bases: Any, body: Any) -> Any:
            if any(isinstance(base, Final) for base in bases):
                raise TypeError("this class is final")
            return super().__new__(cls, name, bases, body)

    class Model(nn.Linear, metaclass=Final):
        pass

    with pytest.raises(TypeError, match=r"subclass of the model's class.*final"):
        roundpipe_fx.compile(Model(4, 4))

    class Table(dict, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        __hash__ = nn.Module.__hash__

    with pytest.raises(TypeError, match="built-in"):
        roundpipe_fx.compile(Table())


@pytest.mark.parametrize("way", ["in place", "torch.compile"])
def test_plans_of_other_ways_in(way: str) -> None:
    model = Forwarding()
    assert roundpipe_fx.plans(model) == ()
    if way == "in place":
        model.compile(backend="roundpipe_fx", options={"memory_budget": 0.5})
        compiled: Any = model
    else:
        compiled = torch.compile(model, backend="roundpipe_fx", options={"memory_budget": 0.5})
    compiled(X).sum().backward()
    (plan,) = roundpipe_fx.plans(compiled)
    assert plan.training and roundpipe_fx.plans(nn.Sequential(compiled)) == (plan,)
    assert "base.0" in str(plan.explain("base.0"))
