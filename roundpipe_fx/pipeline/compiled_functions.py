"""The functions that a pipeline compiles: the model; the model with its loss; and the latter with its outputs too."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from roundpipe_fx.frontend.loss_mark import mark_loss
from roundpipe_fx.pipeline.graph import PipelinedGraph
from roundpipe_fx.torch_private import tree_map

__all__ = ["detached", "functions_of", "loss_output"]


def functions_of(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """The functions to compile: the model; the model with its loss; and the latter with its outputs too.

    With a loss, the model's hooks run for each microbatch; without one, they run for the batch, where the model is
    called.
    """

    def call_model(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return model.forward(*args, **kwargs)

    def call_loss(loss_fn: Any, labelled: bool, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> Any:
        return _loss(loss_fn, labelled, model(*args, **kwargs), label)

    def call_outputs(loss_fn: Any, labelled: bool, args: tuple[Any, ...], kwargs: dict[str, Any], label: Any) -> Any:
        output = model(*args, **kwargs)
        return _loss(loss_fn, labelled, output, label), tree_map(detached, output)

    return {"model": _own_code(call_model), "loss": _own_code(call_loss), "outputs": _own_code(call_outputs)}


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy with its own code object: Dynamo caches by code object, at most eight entries each."""
    return types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def _loss(loss_fn: Any, labelled: bool, output: Any, label: Any) -> Any:
    # Without a variable for the loss: Dynamo would name its node so, and what steps have shown of a graph, which is
    # known by its text, would not hold for the same graph without a mark.
    if loss_fn is not None:
        return _marked(loss_fn(output, label) if labelled else loss_fn(output))
    if isinstance(output, torch.Tensor):
        return _marked(output)
    return _marked(output[0] if isinstance(output, tuple) else output.loss)


def _marked(value: Any) -> Any:
    return mark_loss(value) if isinstance(value, torch.Tensor) else value


def detached(value: Any) -> Any:
    """A tensor without its history; anything else as it is."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def loss_output(graph: PipelinedGraph, loss_fn: Any) -> int:
    """Number of the output that is the loss."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__) if loss_fn is not None else "the model"
    losses = [place for place in graph.main.tangents if place not in graph.main.mutations]
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
    (place,) = losses
    shape = tuple(graph.outputs[place].shape)
    if shape:
        raise ValueError(
            f"{name} returned a loss of shape {shape}; it must be a single number, as from reduction='sum' or .sum()."
        )
    return place
