"""The arguments of a call by the names of the operator's schema, and which of them are tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def operand_nodes(node: fx.Node) -> list[fx.Node]:
    """The tensor operands of a call, in the order of the operator's schema.

    Lists are flattened and repetitions kept; symbolic scalars and ``None`` are left out.

    Args:
        node: a call of an operator.

    Returns:
        The nodes; empty for what is no call of an operator (``getitem``, graph inputs).
    """
    return [operand for _, operands in tensor_arguments(node) for operand in operands]


def tensor_arguments(node: fx.Node) -> list[tuple[str, list[fx.Node]]]:
    """Like :func:`operand_nodes`, by argument: the name of each argument that holds tensors, and the tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    # The order of the schema, not of the call: keyword arguments come where the operator declares them.
    by_name = ((name, _tensors(value)) for name, value in arguments(node).items())
    return [(name, operands) for name, operands in by_name if operands]


def _tensors(value: Any) -> list[fx.Node]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in values if isinstance(item, fx.Node) and isinstance(item.meta.get("val"), torch.Tensor)]


def arguments(node: fx.Node) -> dict[str, Any]:
    """All arguments of a call by name, in the order of the schema, with the defaults of those that are not given."""
    assert isinstance(node.target, torch._ops.OpOverload)
    by_name = {}
    for position, argument in enumerate(node.target._schema.arguments):
        # A call may leave out arguments that have defaults, and pass by name those that could be positional.
        if position < len(node.args) and not argument.kwarg_only:
            by_name[argument.name] = node.args[position]
        else:
            by_name[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return by_name


class Call:
    """A call as the rules read it: arguments by name, shapes, results.

    Attributes:
        results: shapes of its tensor results.
    """

    def __init__(self, node: fx.Node, results: Sequence[torch.Tensor]) -> None:
        self.node = node
        self.results = [tuple(result.shape) for result in results]
        self._arguments = arguments(node)

    def __getitem__(self, name: str) -> Any:
        """An argument; sizes that are nodes as their symbolic values, tensors as fake ones."""
        return fx.node.map_arg(self._arguments[name], lambda node: node.meta.get("val"))

    def has(self, name: str) -> bool:
        """Return whether the operator has an argument of this name."""
        return name in self._arguments

    def shape(self, name: str) -> tuple[Any, ...]:
        """The shape of a tensor operand."""
        return tuple(self[name].shape)

    @property
    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """The tensor operands by the name of the argument, each a list."""
        return {name: [node.meta["val"] for node in nodes] for name, nodes in tensor_arguments(self.node)}

    def dim(self, name: str, rank: int) -> int:
        """An argument that names a dimension of a tensor with ``rank`` dimensions, counted from the front."""
        return counted(self[name], rank)

    def dims(self, name: str, rank: int) -> set[int]:
        """An argument that names several dimensions; all, if it names none."""
        named = self[name]
        # No dimension named means all of them, as in ``torch.sum(x, dim=[])``.
        if isinstance(named, int):
            named = [named]
        return {counted(dim, rank) for dim in named} if named else set(range(rank))


def counted(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim + rank if dim < 0 else dim
