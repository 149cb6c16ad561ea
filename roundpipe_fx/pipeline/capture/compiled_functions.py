"""The functions that a pipeline compiles: the model; the model with its loss; and the latter with its outputs too.

A pipeline needs each in one graph. Where it breaks, Dynamo says where it stopped, in words for those who know Dynamo;
the user is told what to do about the usual causes.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from roundpipe_fx.frontend.loss_mark import mark_loss
from roundpipe_fx.pipeline.pipelined_graph import PipelinedGraph
from roundpipe_fx.torch_private import in_function_transform, is_graph_break, tree_map


def functions_of(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """The functions to compile: the model; the model with its loss; and the latter with its outputs too.

    With a loss, the model's hooks run for each microbatch; without one, they run for the batch, where the model is
    called.
    """

    def call_model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model.forward(*args, **kwargs)

    def call_loss(loss_fn: Any, labelled: bool, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> Any:
        return _compute_loss(loss_fn, labelled, model(*args, **kwargs), label)

    def call_outputs(loss_fn: Any, labelled: bool, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> Any:
        output = model(*args, **kwargs)
        return _compute_loss(loss_fn, labelled, output, label), tree_map(detach_if_tensor, output)

    return {
        "model": _copy_with_code(call_model),
        "loss": _copy_with_code(call_loss),
        "outputs": _copy_with_code(call_outputs),
    }


def _copy_with_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object: Dynamo caches by code object, at most eight entries each."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def _compute_loss(loss_fn: Any, labelled: bool, output: Any, label: Any) -> Any:
    # Without a variable for the loss: Dynamo would name its node so, and what steps have shown of a graph, which is
    # known by its text, would not hold for the same graph without a mark.
    if loss_fn is not None:
        return _mark_if_tensor(loss_fn(output, label) if labelled else loss_fn(output))
    if isinstance(output, torch.Tensor):
        return _mark_if_tensor(output)
    if isinstance(output, tuple):
        return _mark_if_tensor(output[0])
    return _mark_if_tensor(output["loss"] if type(output) is dict else output.loss)


def _mark_if_tensor(value: Any) -> Any:
    return mark_loss(value) if isinstance(value, torch.Tensor) else value


def detach_if_tensor(value: Any) -> Any:
    """A tensor without its history; anything else as it is."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def find_loss_output(graph: PipelinedGraph, loss_fn: Any) -> int:
    """Number of the output that is the loss."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__) if loss_fn is not None else "the model"
    losses = [position for position in graph.main.tangents if position not in graph.main.mutations]
    if len(losses) > 1:
        raise ValueError(
            f"{name} returned {len(losses)} tensors that can be differentiated, and a step differentiates one: return "
            "their (weighted) sum. To see each, have the model compute them, and use return_outputs=True."
        )
    if not losses:
        raise ValueError(
            f"{name} returned no loss that can be differentiated: it must return a tensor that depends on parameters "
            "that require grad."
        )
    (position,) = losses
    shape = tuple(graph.outputs[position].shape)
    if shape:
        raise ValueError(
            f"{name} returned a loss of shape {shape}; it must be a single number, as from reduction='sum' or .sum()."
        )
    return position


T = TypeVar("T")

_NEEDED = "a pipeline needs the model in one graph, and the model could not be traced as one"
_OTHERWISE = (
    "Otherwise compile without devices=, num_microbatches=, schedule= and checkpoint=: roundpipe_fx.compile(model, "
    "memory_budget=…) takes models whose graph breaks."
)
_NAMED = 3
"""Most names of modules in a message."""


def call_explaining_breaks(model: nn.Module, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Call a function, and say what to do if the model cannot be traced as one graph."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        if is_graph_break(error) and _NEEDED not in str(error):
            cause = next(_find_causes(model, str(error)))
            error.args = (f"{_NEEDED}: {cause.partition(':')[0]}.\n{error}", *error.args[1:])
            error.add_note(f"roundpipe_fx: {_NEEDED}. Cause: {cause} {_OTHERWISE}")
        raise


def _find_causes(model: nn.Module, text: str) -> Iterator[str]:
    """Possible causes of the graph's end, and what to do; the most certain first."""
    if in_function_transform():
        yield "a transform of torch.func (vmap, grad, jvp) around the call: transform the original model, uncompiled."
    modules = [(name or "the model", module) for name, module in model.named_modules()]
    offloaded = [name for name, module in modules if hasattr(module, "_hf_hook")]
    if offloaded:
        yield (
            f"accelerate's hooks, as of {_quote_names(offloaded)}: load the model without device_map= and cpu_offload, "
            "or remove them with accelerate.hooks.remove_hook_from_submodules(model). devices=['cuda:0'] offloads a "
            "model that lies on the CPU as a whole."
        )
    hooked = [name for name, module in modules if module._backward_hooks or module._backward_pre_hooks]
    if hooked and re.search("[Bb]ackwards? hooks|grad_fn", text):
        yield (
            f"backward hooks of {_quote_names(hooked)}: remove them. Hooks on the whole model, outside of "
            "forward_backward, and on parameters (parameter.register_hook) work."
        )
    if re.search(r"\bRandom\.\w+|\brandom\.\w+\(|built-in method random", text):
        yield (
            "Python's random numbers: draw them before the call of the model, and pass tensors that depend on them "
            "(layer drop: set its probability to 0)."
        )
    if re.search(r"enter an? `R?[Ll]ock` context manager", text):
        yield (
            "a lock, under which the first call of a model makes what later calls find (Hugging Face's hooks for "
            "output_router_logits, output_hidden_states and the like): call the model once before it is compiled."
        )
    if re.search("[Nn]ested ?[Tt]ensor|jagged", text):
        yield "a jagged tensor: pass padded tensors and a mask, or values and offsets as separate tensors."
    if re.search("data-dependent|Data-dependent|Data dependent|item\\(\\)|aten.nonzero", text):
        yield (
            "Python code or an operator reads a number from a tensor: compute with the tensor instead (torch.where), "
            "keep the number in Python, or compute it before the call of the model."
        )
    yield "what the text of this error names, at the line of your model that it has: change or remove that."


def _quote_names(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, names[:_NAMED])) + (f" and {more} more" if more > 0 else "")
