"""Kept results: tensors of a forward that the model does not return, but keeps in attributes, lists or its hooks.

A call of a pipelined model receives results that workers have computed, in a graph that autograd must not
differentiate. The step's own results replace them in the model's return value (:func:`find_step_result`) and in the
attributes that its forward sets. An auxiliary loss in an attribute can then be differentiated, as in eager mode. With
several microbatches it is the last one's: differentiating it is an error, and a warning names the attributes that
differ between microbatches.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections import UserDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from roundpipe_fx.pipeline.batches.structures import attributes_of, map_leaves

_Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Returned results that are differentiated, and the step's own."""


class KeptResults:
    """The results that a model keeps."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._keeps: dict[int, tuple[weakref.ref[Any], bool]] = {}

    def replaced(
        self, graph: Any, returned: Sequence[Any], pairs: _Pairs, output: Any, microbatches: int
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """The model's output with the step's own results, which are also put in the place of what the model keeps.

        Args:
            returned: results that the call got.
            pairs: those that are differentiated; none in a step that has differentiated them.

        Returns:
            the output, and what the model keeps, detached, by name.
        """
        result_of = functools.partial(find_step_result, pairs)
        if pairs:
            seen: set[int] = set()
            output = map_leaves(
                lambda _, leaf: _replace_tensors(leaf, lambda value, _: result_of(value), "", seen), output
            )
        kept: dict[str, torch.Tensor] = {}
        # With one microbatch and no gradient, what the model keeps is right as it is.
        if self._keeps_nothing(graph) or (microbatches == 1 and not pairs):
            return output, kept

        def replace(value: torch.Tensor, name: str) -> torch.Tensor:
            # Only memory of the step's own results is replaced: what the model keeps from elsewhere is its own
            # business.
            if not any(isinstance(result, torch.Tensor) and _shares(result, value) for result in returned):
                return value
            kept[name] = value.detach()
            result = result_of(value)
            # Of several microbatches only the last one's is kept. It can be read, but its gradient would be that of one
            # part of the batch.
            if microbatches == 1 or result is value:
                return result
            return _OfLastMicrobatch.apply(result, name, microbatches)

        seen = set()
        # Attributes of all modules, buffers and closures of hooks; not parameters, submodules and PyTorch's own
        # settings.
        for path, module in self._model.named_modules():
            for name, value in [*vars(module).items()]:
                if name in _OF_EVERY_MODULE:
                    continue
                label = f"{path}.{name}".lstrip(".")
                if name in _HOOKS or name == "_buffers":
                    label = f"{path or type(module).__name__} (a hook or buffer)"
                new = _replace_tensors(value, replace, label, seen)
                if new is not value:
                    vars(module)[name] = new
        return output, kept

    def learn(self, graphs: Sequence[Any], kept: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Note which graphs keep results; warn, once for each graph, if they differ between microbatches.

        Args:
            kept: what the model kept of each.
        """
        # Each graph is examined once: later steps skip the search if nothing was kept.
        new = [graph for graph in graphs if self._known(graph) is None]
        for graph in new:
            of_graph = [names for other, names in zip(graphs, kept, strict=True) if other is graph]
            self._keeps[id(graph)] = weakref.ref(graph), any(of_graph)
        names = [name for name in kept[0] if any(_differs(kept[0][name], other.get(name)) for other in kept[1:])]
        # `spectral_norm` keeps a weight that it has normalized: it is equal for all microbatches but for the power
        # iteration, and no output.
        names = [name for name in names if not self._is_derived_weight(name, kept[0][name])]
        if new and names:
            warnings.warn(
                f"roundpipe_fx: the forward keeps {', '.join(map(repr, names[:3]))}, of {len(kept)} microbatches that "
                "of the last one. It is not the batch's, and to differentiate it is an error. Return it with the "
                "output, which is merged, or compile the model with num_microbatches=1.",
                stacklevel=2,
            )

    def _known(self, graph: Any) -> bool | None:
        reference, keeps = self._keeps.get(id(graph), (None, False))
        return keeps if reference is not None and reference() is graph else None

    def _keeps_nothing(self, graph: Any) -> bool:
        return self._known(graph) is False

    def _is_derived_weight(self, name: str, value: torch.Tensor) -> bool:
        """Return whether a value is computed from a parameter of its module (``spectral_norm``), not from the batch."""
        try:
            module = self._model.get_submodule(name.rpartition(".")[0])
        except AttributeError:
            return False
        return any(parameter.shape == value.shape for parameter in module.parameters(recurse=False))


def find_step_result(pairs: _Pairs, value: Any) -> Any:
    """The step's own result for a tensor that AOTAutograd has derived from it: the result itself, or a view of its
    memory.

    Args:
        pairs: returned results that are differentiated, and the step's own.
        value: part of the model's output.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    # AOTAutograd returns views and aliases of results; the memory tells which result a tensor belongs to.
    sharing = [shared for alias, shared in pairs if _shares(alias, value)]
    for shared in sharing:  # results may be views of one another, each with a gradient of its own, as those of unbind
        if (value.shape, value.stride(), value.storage_offset()) == (
            shared.shape,
            shared.stride(),
            shared.storage_offset(),
        ):
            return shared
    if sharing:  # one of several views of an intermediate result, which the graph returns in their place
        return sharing[0].as_strided(value.shape, value.stride(), value.storage_offset())
    return value


def _shares(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _differs(value: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is None or value.shape != other.shape or not torch.equal(value, other)


_MODULE = vars(nn.Module())
_HOOKS = frozenset(name for name in _MODULE if name.endswith("_hooks"))
_OF_EVERY_MODULE = frozenset(_MODULE) - _HOOKS - {"_buffers"}
_NOT_SEARCHED = (
    str, bytes, int, float, complex, type(None), torch.Size, torch.dtype, torch.device, type, nn.Parameter, nn.Module,
    types.ModuleType, types.BuiltinFunctionType, weakref.ref, set, frozenset,
)  # fmt: skip


_DEEPEST = 50
"""Levels of objects in one another that are searched."""


def _replace_tensors(
    value: Any, replace: Callable[[torch.Tensor, str], torch.Tensor], name: str, seen: set[int], depth: int = 0
) -> Any:
    """A value in which tensors are replaced: itself, changed in place, or a new one for a tensor or a tuple.

    Args:
        replace: called with a tensor and the name of the attribute that leads to it.
        seen: identities of objects that were searched.
        depth: of the value, in objects around it.
    """
    if isinstance(value, _NOT_SEARCHED):
        return value
    if isinstance(value, torch.Tensor):
        return replace(value, name)
    # Objects may refer to each other in cycles, and to long chains (linked lists).
    if id(value) in seen or depth > _DEEPEST:
        return value
    depth += 1
    seen.add(id(value))
    # Tuples cannot be changed in place: a new one of the same type, and only if an item was replaced.
    if isinstance(value, tuple):
        items = [_replace_tensors(item, replace, name, seen, depth) for item in value]
        if all(new is item for new, item in zip(items, value, strict=True)):
            return value
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, (dict, UserDict)):
        for key, item in [*value.items()]:
            new = _replace_tensors(item, replace, name, seen, depth)
            if new is not item:
                value[key] = new
    elif isinstance(value, (list, deque)):
        for index, item in enumerate(value):
            new = _replace_tensors(item, replace, name, seen, depth)
            if new is not item:
                value[index] = new
    # A hook may keep results in a closure (`outputs.append`): lists are changed in place, so the hook sees the new
    # ones.
    for cell in getattr(value, "__closure__", None) or ():  # of a hook
        with contextlib.suppress(ValueError):  # it is empty
            _replace_tensors(cell.cell_contents, replace, name, seen, depth)
    if isinstance(value, types.MethodType):
        _replace_tensors(value.__self__, replace, name, seen, depth)
        return value
    for attribute, item in [*attributes_of(value).items()]:
        new = _replace_tensors(item, replace, name, seen, depth)
        if new is not item:
            object.__setattr__(value, attribute, new)
    return value


class _OfLastMicrobatch(torch.autograd.Function):
    """A kept result of one microbatch, of which a step has several."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, name: str, microbatches: int) -> torch.Tensor:
        ctx.name, ctx.microbatches = name, microbatches
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            f"{ctx.name!r}, which the forward keeps, is of the last of {ctx.microbatches} microbatches, so its "
            "gradient would not be that of the batch. Return it with the output, which is merged; or add it to the "
            "loss inside the model, or in the loss_fn of forward_backward; or compile with num_microbatches=1."
        )
