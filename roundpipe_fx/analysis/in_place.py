"""In-place forms: how an operation can overwrite an operand that is no longer needed.

There are three: the in-place operator (``mul_``) overwrites the first operand; the out variant (``mul.out``) any
operand; and functions write a part of the first operand (:mod:`roundpipe_fx.operators.partial_writes`), where there is
no such operator. The second is used only if the device has a kernel for it; otherwise it would compute a new result and
copy.
Pointwise operations read and write element by element, so they can overwrite any operand; softmax and its backward
along the last dimension run row by row on the CPU, and read a row before they write it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import has_tag, input_nodes, is_tensor
from roundpipe_fx.operators.partial_writes import PARTIAL_WRITES
from roundpipe_fx.torch_private import has_kernel

aten = torch.ops.aten

# Operators other than pointwise ones that change a part of their first operand.
_PARTIAL = (
    aten.copy,
    aten.index_put,
    aten.index_add,
    aten.index_copy,
    aten.index_fill,
    aten.masked_fill,
    aten.masked_scatter,
    aten.scatter,
    aten.scatter_add,
)


@dataclass(frozen=True)
class InPlaceForm:
    """A form of an operation that writes over one of its operands.

    Attributes:
        target: the operator, or a function.
        operand: the operand that is overwritten.
        output: name of the argument that takes the operand; ``None``: it is the first argument.
    """

    target: torch._ops.OpOverload | Callable[..., torch.Tensor]
    operand: fx.Node
    output: str | None


def operands_to_write_over(node: fx.Node) -> list[fx.Node]:
    """Operands that ``node`` could overwrite if they die here and were allocated in the same scope, best first."""
    return [form.operand for form in in_place_forms(node)]


def in_place_forms(
    node: fx.Node, dies: Callable[[fx.Node, fx.Node], bool] = lambda operand, node: True
) -> list[InPlaceForm]:
    """In-place forms of an operation, best first.

    Args:
        dies: whether an operand (first argument) is not needed after an operation (second argument).
    """
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace != "aten" or not is_tensor(node):
        return []
    in_place, with_output = _in_place_form(node), _form_with_output(node)
    if in_place is None and with_output is None:
        return []
    # An operand that is read twice (x * x) may be overwritten before its second read.
    read: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), read.append)
    operands = [
        argument
        for argument in node.args
        if isinstance(argument, fx.Node)
        and read.count(argument) == 1  # once, lists of indices included
        and dies(argument, node)
        and _same_layout(argument, node)
    ]
    if not operands or _has_uncertain_strides(node):
        return []
    forms = []
    if in_place is not None and operands and operands[0] is node.args[0]:
        forms.append(InPlaceForm(in_place, operands[0], None))
    for operand in operands:
        if with_output is not None and not (forms and operand is node.args[0]):
            forms.append(InPlaceForm(with_output[0], operand, with_output[1]))
    return forms


def _in_place_form(node: fx.Node) -> torch._ops.OpOverload | Callable[..., torch.Tensor] | None:
    assert isinstance(node.target, torch._ops.OpOverload)
    writing = PARTIAL_WRITES.get(node.target)
    if writing is not None:
        return writing
    return None if node.kwargs.keys() & {"dtype", "memory_format"} else _in_place_kernel(node.target)


@functools.cache
def _in_place_kernel(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    if not has_tag(target, torch.Tag.pointwise) and target.overloadpacket not in _PARTIAL:
        return None
    packet = getattr(aten, f"{target.overloadpacket.__name__}_", None)
    form = getattr(packet, target._overloadname, None) if packet is not None else None
    # `mul_.Tensor` for `mul.Tensor`: the same arguments, of which the first one is written.
    if form is None:
        return None
    arguments, parameters = form._schema.arguments, target._schema.arguments
    mutated = arguments[0].alias_info is not None and arguments[0].alias_info.is_write
    same = [argument.name for argument in arguments] == [argument.name for argument in parameters]
    return form if mutated and same else None


# Operators that run row by row along the last dimension on the CPU (found by trial), and the position of ``dim``.
_BY_ROW = {
    aten._softmax.default: 1,
    aten._softmax_backward_data.default: 2,
    aten._log_softmax.default: 1,
    aten._log_softmax_backward_data.default: 2,
}


def _form_with_output(node: fx.Node) -> tuple[torch._ops.OpOverload, str] | None:
    """The out variant of an operation, and the name of its output argument."""
    target = node.target
    value = node.meta["val"]
    assert isinstance(target, torch._ops.OpOverload)
    if not has_tag(target, torch.Tag.pointwise) and not (target in _BY_ROW and _is_row_by_row(node)):
        return None
    if node.kwargs.keys() & {"dtype", "memory_format", "layout", "device"}:
        return None
    return _kernel_with_output(target, value.device.type)


def _is_row_by_row(node: fx.Node) -> bool:
    values = [node.meta["val"], *(source.meta["val"] for source in input_nodes(node))]
    dim = node.args[_BY_ROW[node.target]]  # type: ignore[index]
    return (
        all(value.device.type == "cpu" and value.is_contiguous() for value in values)
        and len({value.dtype for value in values}) == 1
        and dim in (-1, values[0].dim() - 1)
    )


@functools.cache
def _kernel_with_output(target: torch._ops.OpOverload, device: str) -> tuple[torch._ops.OpOverload, str] | None:
    names = [argument.name for argument in target._schema.arguments]
    packet = target.overloadpacket
    # Overloads of an operator: the one whose arguments are the same but for one that takes the output.
    for name in packet.overloads():
        form = getattr(packet, name)
        arguments = form._schema.arguments
        outputs = [argument.name for argument in arguments if argument.is_out]
        if len(outputs) != 1 or [argument.name for argument in arguments if not argument.is_out] != names:
            continue
        types = [str(argument.type) for argument in arguments if not argument.is_out]
        if types == [str(argument.type) for argument in target._schema.arguments] and has_kernel(form, device):
            return form, outputs[0]
    return None


def _has_uncertain_strides(result: fx.Node) -> bool:
    """Return whether strides of dimensions of size 1 may differ from the recorded ones.

    They do not change addresses, but some kernels (batch norm) choose the order of their loops by them, and thereby the
    rounding. Where operands disagree about them, fake kernels do not always compute the real ones.
    """
    value = result.meta["val"]
    # Sizes of 1 only: for larger ones the stride is part of the address.
    if not any(isinstance(size, int) and size == 1 for size in value.shape):
        return False
    shape, strides = str(tuple(value.shape)), str(value.stride())
    operands = [source.meta["val"] for source in input_nodes(result) if is_tensor(source)]
    return any(str(tuple(operand.shape)) == shape and str(operand.stride()) != strides for operand in operands)


def _same_layout(operand: fx.Node, result: fx.Node) -> bool:
    if operand.op != "call_function" or not is_tensor(operand):
        return False
    left, right = operand.meta["val"], result.meta["val"]
    if left.layout is not torch.strided or left.dtype != right.dtype or left.device != right.device:
        return False
    if left.dtype.is_complex:
        return False  # out variants traverse some layouts in another order, and round products differently
    # As text: comparing symbolic sizes would add guards.
    if str(tuple(left.shape)) != str(tuple(right.shape)) or str(left.stride()) != str(right.stride()):
        return False
    fills_same_storage = str(left.untyped_storage().nbytes()) == str(right.untyped_storage().nbytes())
    return fills_same_storage and not any(
        isinstance(stride, int) and stride == 0 and not (isinstance(size, int) and size <= 1)
        for size, stride in zip(left.shape, left.stride(), strict=True)
    )
