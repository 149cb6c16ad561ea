"""Own gradients: operations whose gradient the model defines, so that it does not follow from the forward.

The backward in a joint graph includes the effects of ``no_grad``, ``detach`` and ``autograd.Function``. Differentiating
its forward again by autograd would give other gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from roundpipe_fx.torch_private import tree_leaves

_SHAPES_ONLY = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
"""Operations whose result depends on the shape of what they read; so do methods ``new_…``."""


def own_gradients(module: fx.GraphModule) -> tuple[str, ...]:
    """Operations whose gradients autograd would not find from the forward alone.

    Returns:
        each as text: the operation, and the user's line where it is known.
    """
    names = []
    for inner in (part for part in module.modules() if isinstance(part, fx.GraphModule)):
        names += [_text(node) for node in inner.graph.nodes if _has_own_gradient(node)]
    return tuple(dict.fromkeys(names))


def _has_own_gradient(node: fx.Node) -> bool:
    name = _name(node)
    if name == "autograd_function_apply":
        return True
    if node.op not in ("call_function", "call_method") or name in _SHAPES_ONLY or name.startswith("new_"):
        return False
    if not any(value.requires_grad for source in node.all_input_nodes for value in _tensors(source)):
        return False
    results = [value for value in _tensors(node) if value.is_floating_point() or value.is_complex()]
    return bool(results) and not any(value.requires_grad for value in results)


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    return (value for value in tree_leaves(node.meta.get("example_value")) if isinstance(value, torch.Tensor))


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _text(node: fx.Node) -> str:
    name = {"autograd_function_apply": "an autograd.Function"}.get(_name(node), _name(node))
    lines = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
    lines = [line for line in lines if line.strip("^~ ")]  # Python underlines a part of the line
    return f"{name} in `{lines[-1]}`" if lines else name
