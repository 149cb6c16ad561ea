"""Exceptions that the user's model raises while it is traced as one graph.

If graph breaks are allowed, Dynamo runs a function that raises eagerly, so the user gets the original exception. With
``fullgraph=True`` it raises ``Unsupported`` instead, with the user's exception as text. The original exception is
recovered by running the function once more on fake tensors, so that nothing is computed, updated or drawn.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

__all__ = ["keep_users_exceptions"]

T = TypeVar("T")

_OF_THE_CALL = ("Observed exception", "failed to bind arguments")
"""Beginnings of Dynamo's messages where the traced code raises an exception."""


def keep_users_exceptions(function: Callable[..., T], model: nn.Module, /, *args: Any, **kwargs: Any) -> T:
    """Call a function that is compiled as one graph, and raise exceptions of the traced code unchanged.

    Args:
        model: a module whose tensors it may read, and whose attributes it may change, with all modules in it.
        *args: passed to the function.
        **kwargs: passed to the function.
    """
    from torch._dynamo.exc import Unsupported

    try:
        return function(*args, **kwargs)
    except Unsupported as error:
        raised = _raised_on_fakes(function, [*model.modules()], args, kwargs)
        if raised is None or not _is_explained_by(error, raised):
            raise
    try:
        raise raised
    finally:
        del raised  # its traceback holds this frame


def _is_explained_by(error: Exception, raised: Exception) -> bool:
    """Test whether Dynamo refused a call because of the exception that the run on fake tensors raised.

    That run may raise another exception inside PyTorch, which accepts less from fake tensors than from others:
    ``module.to(dtype)`` cannot swap parameters that the mode refers to. Such an exception is not the model's.
    """
    if not str(error).startswith(_OF_THE_CALL):
        return _is_of_user(raised)
    # Dynamo names its class after that of the exception that it has observed.
    observed = error.__cause__
    return observed is None or type(observed).__name__.startswith(f"Observed{type(raised).__name__}")


def _raised_on_fakes(
    function: Callable[..., Any], modules: Collection[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """The exception that a call raises on fake tensors; ``None`` if there is none, or it needs data."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
    )
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    unknown = (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        GuardOnDataDependentSymNode,
    )
    fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)

    def fake(value: Any) -> Any:
        return fakes.from_tensor(value) if isinstance(value, torch.Tensor) else value

    # What the run on fakes logs is no news: the user gets the exception, or Dynamo's.
    silent = _silenced(FakeTensorMode.__module__)
    with silent, _replaced(modules, fake), torch.compiler.set_stance("force_eager"):
        args, kwargs = tree_map(fake, (args, kwargs))
        try:
            with fakes:
                function(*args, **kwargs)
        except unknown:
            return None
        except Exception as error:
            # An error about fake tensors is ours, not the model's.
            return None if _OF_FAKES in str(error) else error
    return None


_OF_FAKES = "FakeTensor"
"""Occurs in errors of functions that do not accept fake tensors, such as ``torch.zeros`` for a size."""


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Context manager in which a logger logs nothing."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _replaced(modules: Collection[nn.Module], replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager in which attributes of modules are replaced; they are restored on exit."""
    kept = [
        (attributes, dict(attributes))
        for module in modules
        for attributes in (vars(module), *map(vars(module).get, _REGISTERED))
        if attributes
    ]
    try:
        for attributes, before in kept:
            attributes.update({name: replacement(value) for name, value in before.items()})
        yield
    finally:
        for attributes, before in kept:
            # Only what the replacement or the run has changed is restored.
            if any(attributes.get(name) is not value for name, value in before.items()) or len(attributes) != len(
                before
            ):
                attributes.clear()
                attributes.update(before)


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _is_of_user(error: BaseException) -> bool:
    """Return whether an exception was raised by code outside of PyTorch."""
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return not Path(traceback.tb_frame.f_code.co_filename).is_relative_to(_TORCH)


_TORCH = Path(torch.__file__).parent
