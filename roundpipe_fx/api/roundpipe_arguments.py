"""RoundPipe's names for the arguments of ``forward_backward``: ``input_args``, ``input_kwargs`` and ``label``.

A name that the model's own ``forward`` takes is the model's, also where it takes any (``**kwargs``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_NAMES = ("input_args", "input_kwargs", "label", "run_config")


def translate_arguments(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], labels: Any
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments of a step: for the model, and labels.

    Args:
        args: as the user passed them.
        kwargs: as the user passed them.
        labels: as the user passed them.

    Raises:
        TypeError: an argument is given twice; or ``run_config`` is given, which is of a single call.
    """
    names = [name for name in _NAMES if name in kwargs]
    if not names:
        return args, kwargs, labels
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return args, kwargs, labels
    renamed = {name: kwargs[name] for name in names if name not in {parameter.name for parameter in parameters}}
    kwargs = {name: value for name, value in kwargs.items() if name not in renamed}
    if "run_config" in renamed:
        raise TypeError(
            "forward_backward has no run_config: a plan is made for one setting. Compile the model once for each, with "
            "roundpipe_fx.compile(model, num_microbatches=…, …); the compiled models share its parameters."
        )
    if renamed.get("input_args"):
        if args:
            raise TypeError("forward_backward was given both positional arguments and input_args.")
        args = tuple(renamed["input_args"])
    for name, value in (renamed.get("input_kwargs") or {}).items():
        if name in kwargs:
            raise TypeError(f"forward_backward was given {name!r} twice: as an argument and in input_kwargs.")
        kwargs[name] = value
    if renamed.get("label") is not None:
        if labels is not None:
            raise TypeError("forward_backward was given both label and labels.")
        labels = renamed["label"]
    return args, kwargs, labels
