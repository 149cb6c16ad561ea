"""The user's own exceptions: what a model raises while it is traced as one graph.

Where a graph may break, Dynamo runs a function that raises eagerly, so the exception is the user's. As one graph
(``fullgraph=True``) it raises its own ``Unsupported`` instead, with the user's exception as text. What the user raised
is found by running the function once more, on fake tensors: nothing is computed, updated or drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

__all__ = ["keep_users_exceptions"]

T = TypeVar("T")

_OF_THE_CALL = ("Observed exception", "failed to bind arguments")
"""How Dynamo's message begins where the traced code raises, whoever wrote the line that does."""


def keep_users_exceptions(
    function: Callable[..., T], modules: Collection[nn.Module], /, *args: Any, **kwargs: Any
) -> T:
    """Call what is compiled as one graph. If tracing meets an exception of the user's, it is raised as it is.

    Args:
        function: what ``torch.compile`` returned.
        modules: whose tensors it may read, and what it may change attributes of.
        *args: for the function.
        **kwargs: for the function.
    """
    from torch._dynamo.exc import Unsupported

    try:
        return function(*args, **kwargs)
    except Unsupported as error:
        raised = _raised_on_fakes(function, modules, args, kwargs)
        if raised is None or not (str(error).startswith(_OF_THE_CALL) or _is_of_user(raised)):
            raise
    try:
        raise raised
    finally:
        del raised  # its traceback holds this frame


def _raised_on_fakes(
    function: Callable[..., Any], modules: Collection[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Exception | None:
    """What a call raises; ``None``: nothing, or it asks for data that fake tensors do not have."""
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

    with _replaced(modules, fake), torch.compiler.set_stance("force_eager"):
        args, kwargs = tree_map(fake, (args, kwargs))
        try:
            with fakes:
                function(*args, **kwargs)
        except unknown:
            return None
        except Exception as error:
            return None if _OF_FAKES in str(error) else error
    return None


_OF_FAKES = "FakeTensor"
"""Where PyTorch takes no fake tensor, as ``torch.zeros`` for a size, it says what it was given."""


@contextlib.contextmanager
def _replaced(modules: Collection[nn.Module], replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Attributes of modules are replaced, and afterwards again what they were."""
    kept = [
        (own, dict(own)) for module in modules for own in (vars(module), *map(vars(module).get, _REGISTERED)) if own
    ]
    try:
        for own, before in kept:
            own.update({name: replacement(value) for name, value in before.items()})
        yield
    finally:
        for own, before in kept:
            if any(own.get(name) is not value for name, value in before.items()) or len(own) != len(before):
                own.clear()
                own.update(before)


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _is_of_user(error: BaseException) -> bool:
    """Whether it was raised by code that is not PyTorch's."""
    place = error.__traceback__
    assert place is not None
    while place.tb_next is not None:
        place = place.tb_next
    return not Path(place.tb_frame.f_code.co_filename).is_relative_to(_TORCH)


_TORCH = Path(torch.__file__).parent
