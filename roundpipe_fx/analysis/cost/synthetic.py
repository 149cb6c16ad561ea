"""Made-up operands: what they are made of, and the one place where an operator is run on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.model import tensor_bytes
from roundpipe_fx.analysis.cost.operand_kinds import OnHost, OperandKind
from roundpipe_fx.analysis.cost.operand_rules import arguments_of, kinds_of_call, kinds_of_operator
from roundpipe_fx.budget import available_memory
from roundpipe_fx.ir.joint_graph import tensor_values
from roundpipe_fx.torch_private import number_hint, size_hint, tree_map

FillOperand = Callable[[torch.Tensor], torch.Tensor]
"""Fills a tensor with numbers; integers are not negative."""

_SMALL = 2**24
"""Bytes that are always there: asking a device takes longer."""


class UnsafeOperandsError(ValueError):
    """An operator was about to run on synthetic operands that might end the process."""


def synthetic_operands(node: fx.Node, device: torch.device, fill: FillOperand, single: bool = False) -> tuple[Any, Any]:
    """Positional and keyword arguments like those of a node, with real tensors.

    Args:
        node: the node.
        device: the device of the tensors, except for those that kernels read on the host.
        fill: fills a tensor with numbers; those that the operator does not accept are replaced.
        single: whether tensors have one element.

    Raises:
        UnsafeOperandsError: the operator must not be run on synthetic operands.
    """

    def real(value: torch.Tensor, kind: OperandKind | None) -> torch.Tensor:
        shape = [1 if single else size_hint(size) for size in value.shape]
        stride = [size_hint(step) for step in value.stride()]
        on_host = is_on_host(kind) or (value.dim() == 0 and value.device.type == "cpu")
        filled = fill(torch.empty_strided(shape, stride, dtype=value.dtype, device="cpu" if on_host else device))
        # Kernels that do not support the conjugate and negative bits copy such an operand first.
        filled = filled.conj() if value.is_conj() else filled
        return torch.ops.aten._neg_view.default(filled) if value.is_neg() else filled

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    return fill_operands(node.target, args, kwargs, real)


def fill_operands(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    real: Callable[[Any, OperandKind | None], torch.Tensor],
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call with real tensors of numbers that its operator accepts.

    Args:
        target: the operator.
        args: positional arguments, in which objects with a ``shape`` and a ``dtype`` stand for tensors.
        kwargs: keyword arguments.
        real: makes a filled tensor for such an object.

    Raises:
        UnsafeOperandsError: there are no such numbers, or the operator must not be run on synthetic operands.
    """
    arguments = arguments_of(target, args, kwargs)
    kinds = kinds_of_call(target, arguments)
    if kinds is None:
        raise UnsafeOperandsError(f"{target} does not run safely on synthetic operands like these")
    operands = {}
    for name, value in arguments.items():
        kind = kinds.get(name)
        items = value if isinstance(value, list | tuple) else (value,)
        tensors = [item is not None and hasattr(item, "shape") for item in items]
        filled = [
            real(item, kind) if holds_tensor else _plain(item)
            for item, holds_tensor in zip(items, tensors, strict=True)
        ]
        if kind is not None:
            for position, holds_tensor in enumerate(tensors):
                if holds_tensor:
                    kind.write(filled[position], value, arguments, position)
        operands[name] = filled if isinstance(value, list | tuple) else filled[0]
    names = list(operands)
    return [operands[name] for name in names[: len(args)]], {name: operands[name] for name in names[len(args) :]}


def is_on_host(kind: OperandKind | None) -> bool:
    """Return whether kernels read an operand of a kind on the host; those for ROCm read all on the device."""
    return isinstance(kind, OnHost) and torch.version.hip is None


def _plain(value: Any) -> Any:
    """An argument that is no tensor, with plain numbers for symbolic ones."""
    return tree_map(number_hint, value)


def run_alone(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on made-up operands: the one place where that is done.

    Args:
        target: the operator.
        args: positional arguments.
        kwargs: keyword arguments.

    Raises:
        UnsafeOperandsError: the operator must not be run so.
    """
    if kinds_of_operator(target) is None:
        raise UnsafeOperandsError(f"{target} is not among the operators that run on synthetic operands")
    return target(*args, **kwargs)


def has_memory_for(node: fx.Node, device: torch.device, for_numbers: int = 0) -> bool:
    """Return whether there is memory for made-up operands of a node and its results.

    Args:
        node: an operation on fake tensors.
        device: where it would run.
        for_numbers: bytes that filling takes for each element of an operand.
    """
    operands = [value for source in node.all_input_nodes for value in tensor_values(source)]
    needed = sum(map(_extent, operands)) + tensor_bytes(tensor_values(node))
    needed += for_numbers * sum(size_hint(value.numel()) for value in operands)
    return needed <= _SMALL or needed <= available_memory(device)


def _extent(value: torch.Tensor) -> int:
    """Bytes of a tensor with the strides of another one."""
    sizes = [size_hint(size) for size in value.shape]
    if value.layout is not torch.strided or 0 in sizes:
        return 0
    strides = [size_hint(stride) for stride in value.stride()]
    return (sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1) * value.dtype.itemsize
