"""An object of a generated subclass of a model's own class, which shares the model's attributes.

FSDP2's ``fully_shard`` gives a module such a class too. Here the module keeps its own, and a second object with the
same ``__dict__`` has the generated one: parameters, buffers, submodules, hooks and ``training`` are the model's, now
and later, and the model itself stays eager.
"""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from roundpipe_fx import torch_private

T = TypeVar("T", bound=nn.Module)

_SLOT = "_state_of_roundpipe_fx"
"""The one attribute that the model does not have."""

_STEP = "training_step"
"""The method of a LightningModule, in any package of that name, that its trainer calls."""

_GENERATE = "generate"
"""The method of Hugging Face's models that calls the model for each token."""


class State(Protocol):
    """Attributes of an object of a generated class besides the model's.

    Attributes:
        forward: takes the object and the arguments of the model's ``forward``.
        replaced: the user's replacement of ``forward``.
        ran: whether the compiled forward has run since, or the user has been told that it does not.
        own_options: whether it is compiled with options that another compilation, of a module around it, must not drop.
        stepped: whether a ``training_step`` has run, and the user been told if it does not call the compiled forward.
    """

    original: nn.Module
    forward: Callable[..., Any]
    replaced: Callable[..., Any] | None
    ran: bool
    own_options: bool
    stepped: bool

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the compiled forward."""

    def for_generation(self, model: nn.Module) -> nn.Module:
        """The module whose ``generate`` is called for that of an object of a generated class."""


def make_sharing_instance(model: nn.Module, mixin: type[T], state: State, names: Iterable[str]) -> T:
    """Make an object that equals the model except for its class and its ``forward``.

    Args:
        model: whose attributes it shares.
        mixin: what the class derives from in addition to the model's.
        state: stored in its slot.
        names: of the mixin's attributes; if the model has an attribute of that name, it stays the model's.

    Raises:
        TypeError: the model's class cannot be derived from, or has another memory layout than a Python object.
    """
    # A method of the mixin gives way to an attribute of that name in the model.
    cls = _make_subclass(type(model), mixin, frozenset(name for name in names if _has_attribute(model, name)))
    try:
        instance = object.__new__(cls)
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__} derives from a built-in type, which cannot be shared: {error}"
        ) from None
    # Shared, not copied: what either object registers later, the other one has.
    object.__setattr__(instance, "__dict__", model.__dict__)
    object.__setattr__(instance, _SLOT, state)
    return instance


_classes: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def _make_subclass(base: type, mixin: type[T], model_names: frozenset[str]) -> type[T]:
    # Models of one class share the generated one, which ends with the last of them.
    key = (base, mixin, model_names)
    subclass = _classes.get(key)
    if subclass is None:
        body = {
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__slots__": (_SLOT,),
            "forward": _Forward(base),
            **({_STEP: _TrainingStep(base)} if hasattr(base, _STEP) else {}),
            **({_GENERATE: _Generate(base)} if _can_generate(base) else {}),
            "__new__": lambda cls, *args, **kwargs: base(*args, **kwargs),  # containers make slices of themselves so
            **{name: _forward_to_original(name) for name in (*model_names, *_list_slots(base))},
        }
        # ``nn.Module`` itself is a base of the mixin already.
        bases = (mixin,) if base is nn.Module else (mixin, base)
        try:
            subclass = types.new_class(base.__name__, bases, exec_body=lambda namespace: namespace.update(body))
        except TypeError as error:
            raise TypeError(
                f"roundpipe_fx.compile makes a subclass of the model's class, but {base.__qualname__} allows none: "
                f"{error}"
            ) from error
        _classes[key] = subclass
    return subclass


def _has_attribute(model: nn.Module, name: str) -> bool:
    """Return whether it is an attribute of the model's own, not one that its ``__getattr__`` takes from elsewhere."""
    registered = (model._parameters, model._buffers, model._modules)
    return hasattr(type(model), name) or name in vars(model) or any(name in names for names in registered)


def _list_slots(base: type) -> list[str]:
    # Slots are not in ``__dict__``, and must be read from the original.
    return [
        name
        for cls in base.__mro__
        for name, value in vars(cls).items()
        if isinstance(value, types.MemberDescriptorType)
    ]


def _forward_to_original(name: str) -> property:
    """An attribute that is not in ``__dict__``, or to which the mixin gives another meaning."""

    def original(self: Any) -> Any:
        return self._state_of_roundpipe_fx.original

    return property(
        lambda self: getattr(original(self), name),
        lambda self, value: setattr(original(self), name, value),
        lambda self: delattr(original(self), name),
    )


class _Forward:
    """``forward``: on the class, the model's own function; on an object, the compiled one or its replacement.

    It takes precedence over ``__dict__``, where the model may have another ``forward``; a replacement is not shared
    with the model.
    """

    def __init__(self, base: type) -> None:
        self.base = base

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self.base.forward  # type: ignore[attr-defined]
        state = instance._state_of_roundpipe_fx
        # The user's replacement runs as it is; the first time it is watched for whether it calls the compiled forward.
        if state.replaced is not None:
            has_run = state.ran or torch.compiler.is_compiling()
            return state.replaced if has_run else _watch_replacement(state, state.replaced)
        # Traced within another model: the plain forward is inlined, unless this one has options of its own.
        if torch.compiler.is_compiling() and "forward" not in instance.__dict__:
            bound = state.forward if _stays_apart(state) else self.base.forward  # type: ignore[attr-defined]
            return functools.partial(bound, instance)
        # Bound on access: if it were stored, it would be a cycle, which only garbage collection ends.
        return types.MethodType(state.forward, instance)

    def __set__(self, instance: Any, value: Callable[..., Any]) -> None:
        state = instance._state_of_roundpipe_fx
        state.replaced, state.ran = value, False

    def __delete__(self, instance: Any) -> None:
        instance._state_of_roundpipe_fx.replaced = None


def _watch_replacement(state: State, replaced: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of ``forward`` that warns if it has not run the compiled one, as a wrapper of it would.

    Of a method it is a method too: libraries look for its function.
    """
    # Bound to the same object, with its function watched.
    if isinstance(replaced, types.MethodType):
        return types.MethodType(_watch_replacement(state, replaced.__func__), replaced.__self__)

    @functools.wraps(replaced)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = replaced(*args, **kwargs)
        if not state.ran:
            state.ran = True
            name = getattr(replaced, "__qualname__", type(replaced).__qualname__)
            warnings.warn(
                f"roundpipe_fx: the forward of the compiled model was replaced by {name}, which does not call the "
                "compiled one: the model runs eagerly, and no memory_budget applies. Compile the part of the model "
                "that the replacement calls, or compile the model after its forward has been replaced.",
                stacklevel=2,
            )
        return outputs

    return forward


class _TrainingStep:
    """``training_step``: the model's own, which warns if its first step has not run the compiled forward.

    It is not compiled itself: Dynamo fails in Lightning's ``self.log``.
    """

    def __init__(self, base: type) -> None:
        self.base = base

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        method = getattr(self.base, _STEP)
        if instance is None:
            return method
        if instance._state_of_roundpipe_fx.stepped or torch.compiler.is_compiling():
            return types.MethodType(method, instance)
        return types.MethodType(_watch_step(instance._state_of_roundpipe_fx, method), instance)


def _watch_step(state: State, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Reset for this step, so that `ran` tells of it alone.
        before, state.ran = state.ran, False
        try:
            outputs = step(self, *args, **kwargs)
            if not state.ran:
                _warn_of_step(state.original, step)
            state.stepped = True
        finally:
            state.ran = state.ran or before or state.stepped
        return outputs

    return training_step


def _can_generate(base: type) -> bool:
    return hasattr(base, _GENERATE) and any(cls.__name__ == "GenerationMixin" for cls in base.__mro__)


class _Generate:
    """``generate``: the model's own, of the object that the state names."""

    def __init__(self, base: type) -> None:
        self.base = base

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        method = getattr(self.base, _GENERATE)
        if instance is None:
            return method
        return types.MethodType(method, instance._state_of_roundpipe_fx.for_generation(instance))


def _warn_of_step(model: nn.Module, step: Callable[..., Any]) -> None:
    parts = [name for name, part in model.named_children() if next(part.parameters(), None) is not None]
    text = (
        f"roundpipe_fx: {step.__qualname__} does not call the compiled model, self(...): the step runs eagerly, and no "
        "memory_budget applies. Call self(...) there, with a forward that computes what needs memory, or compile the "
        "part that it calls"
    )
    if parts:
        text += f", as in model.{parts[0]} = roundpipe_fx.compile(model.{parts[0]}, memory_budget=…)"
    code = inspect.unwrap(step).__code__
    warnings.warn_explicit(text + ".", UserWarning, code.co_filename, code.co_firstlineno)


def _stays_apart(state: State) -> bool:
    """Return whether a compilation around it breaks its graph, so that the model is compiled with its own options."""
    return state.own_options and torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting()


@torch.compiler.disable(reason="a model that roundpipe_fx.compile has compiled with options of its own")
def _run_apart(state: State, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return state.run(args, kwargs)


def forward_like(model: nn.Module) -> Callable[..., Any]:
    """A ``forward`` with the signature of the model's, which runs the one in the state of its object.

    Where ``torch.export``, ``torch.jit.trace`` or FX trace it, it is the model's own; also in ``torch.compile`` of a
    module around it, unless the model has options of its own.
    """

    def forward(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if _stays_apart(self._state_of_roundpipe_fx):
            return _run_apart(self._state_of_roundpipe_fx, args, kwargs)
        if torch.compiler.is_compiling() or torch_private.is_traced():
            return model.forward(*args, **kwargs)
        return self._state_of_roundpipe_fx.run(args, kwargs)

    # Not functools.wraps: libraries look for wrappers of theirs along __wrapped__, and would find the model's own.
    original: Any = model.forward
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(forward, name, getattr(original, name, getattr(forward, name)))
    forward.__annotations__ = dict(getattr(original, "__annotations__", {}))
    try:
        signature = inspect.signature(original)
    except ValueError:  # of a function that is not Python's
        return forward
    # The function is bound as a method, so its signature begins with the object.
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[receiver, *signature.parameters.values()])  # type: ignore[attr-defined]
    return forward
