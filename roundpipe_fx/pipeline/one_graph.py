"""Explanations for models that a pipeline cannot take, because they cannot be traced as one graph.

Dynamo says where it stopped, in words for those who know Dynamo. The user needs to know that a pipeline needs one
graph, and what to do about the usual causes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from roundpipe_fx.torch_private import is_graph_break, tree_leaves

__all__ = ["explaining_breaks", "refuse_jagged"]

T = TypeVar("T")

_NEEDED = "a pipeline needs the model in one graph, and the model could not be traced as one"
_OTHERWISE = (
    "Otherwise compile without devices=, num_microbatches=, schedule= and checkpoint=: roundpipe_fx.compile(model, "
    "memory_budget=…) takes models whose graph breaks."
)
_NAMED = 3
"""Most names of modules in a message."""


def explaining_breaks(model: nn.Module, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function, and say what to do if the model cannot be traced as one graph.

    Args:
        model: the model.
        call: traces it.
        *args: for ``call``.
        **kwargs: for ``call``.
    """
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if is_graph_break(error) and _NEEDED not in str(error):
            cause = next(_causes(model, str(error)))
            error.args = (f"{_NEEDED}: {cause.partition(':')[0]}.\n{error}", *error.args[1:])
            error.add_note(f"roundpipe_fx: {_NEEDED}. Cause: {cause} {_OTHERWISE}")
        raise


def _causes(model: nn.Module, text: str) -> Iterator[str]:
    """What may have ended the graph, and what to do; the most certain first."""
    modules = [(name or "the model", module) for name, module in model.named_modules()]
    offloaded = [name for name, module in modules if hasattr(module, "_hf_hook")]
    if offloaded:
        yield (
            f"accelerate's hooks, as of {_names(offloaded)}: load the model without device_map= and cpu_offload, or "
            "take them off with accelerate.hooks.remove_hook_from_submodules(model). devices=['cuda:0'] offloads a "
            "model that lies on the CPU as a whole."
        )
    hooked = [name for name, module in modules if module._backward_hooks or module._backward_pre_hooks]
    if hooked and re.search("[Bb]ackwards? hooks|grad_fn", text):
        yield (
            f"backward hooks of {_names(hooked)}: remove them. Hooks on the whole model, outside of forward_backward, "
            "and on parameters (parameter.register_hook) work."
        )
    if re.search(r"\bRandom\.\w+|\brandom\.\w+\(|built-in method random", text):
        yield (
            "Python's random numbers: draw them before the call of the model, and pass tensors that depend on them "
            "(layer drop: set its probability to 0)."
        )
    if re.search("[Nn]ested|jagged", text):
        yield "a jagged tensor: pass padded tensors and a mask, or values and offsets as separate tensors."
    if re.search("data-dependent|Data-dependent|Data dependent|item\\(\\)|aten.nonzero", text):
        yield (
            "Python code or an operator reads a number from a tensor: compute with the tensor instead (torch.where), "
            "keep the number in Python, or compute it before the call of the model."
        )
    yield "what the text of this error names, at the line of your model that it has: change or remove that."


def _names(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")


def refuse_jagged(inputs: Any) -> None:
    """Raise for jagged tensors, which have no dimension of the batch to split.

    Args:
        inputs: of the model, to be split by convention.

    Raises:
        ValueError: one of them is jagged.
    """
    for value in tree_leaves(inputs):
        if isinstance(value, torch.Tensor) and value.is_nested:
            raise ValueError(
                "a jagged (nested) tensor cannot be split into microbatches: pass padded tensors and a mask, or values "
                "and offsets as separate tensors with split_input= a callable (args, kwargs, count) -> (list of args, "
                "list of kwargs). A pipeline needs the model in one graph, in which such tensors cannot be either; "
                "roundpipe_fx.compile(model) without num_microbatches and devices takes them."
            )
