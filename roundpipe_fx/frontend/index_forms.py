"""Index forms: values of a graph as formulas of their indices, for any size.

Masks of attention are comparisons of ``arange``. Each value on the way to one is *affine* in its indices
(``positions[:, None] + 1`` is ``1 + i``), or a *choice* between two constants by inequalities that are affine in them
(``columns <= rows`` is true where ``j - i <= 0``). The forms (:mod:`roundpipe_fx.frontend.affine_forms`) are computed
by abstract interpretation, with one rule per operator, so they hold for every length, symbolic ones included, and cost
nothing where masks are long. A value that is neither has no form.

An example, with the forms of a sliding window of 8 in a sequence of 4, of which nothing remains::

    rows = torch.arange(4)[:, None]        # i
    columns = torch.arange(4)[None, :]     # j
    near = columns > rows - 8              # i - j - 7 <= 0: at most -4 for these sizes, so True
    mask = near & (columns <= rows)        # True where j - i <= 0, else False
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from roundpipe_fx.frontend.affine_forms import (
    Affine,
    Choice,
    IndexForm,
    Number,
    align_dims,
    drop_unit_slopes,
    find_bounds,
    list_conditions,
    normalize,
    plain_sizes,
    remap_indices,
)


def pure_operation(node: fx.Node) -> str | None:
    """The name of an operation of Dynamo's graph that reads its operands alone, and writes nothing; else ``None``."""
    if "out" in node.kwargs:
        return None
    if node.op == "call_method":
        name = str(node.target)
        if name.startswith("__") and name.endswith("__"):  # as torch 2.11 has comparisons
            name = name[2:-2]
        return name if name in _PURE else None
    if node.op != "call_function":
        return None
    name = str(getattr(node.target, "__name__", ""))
    if getattr(operator, name, None) is node.target:
        name = name.removesuffix("_")
    elif all(getattr(library, name, None) is not node.target for library in (torch, F)):
        return None
    return name if name in _PURE else None


def index_form(node: fx.Node, forms: Mapping[fx.Node, IndexForm | None]) -> IndexForm | None:
    """The form of a value of Dynamo's graph; ``None`` if it has none that is known.

    Args:
        node: a pure operation (:func:`pure_operation`) whose result is a tensor.
        forms: the forms of its operands.
    """
    result, name = node.meta.get("example_value"), pure_operation(node)
    if not isinstance(result, torch.Tensor) or name is None or any(size == 0 for size in plain_sizes(result.shape)):
        return None
    operation = _Operation(node, name, result, forms)
    rule = _RULES.get(name)
    form = rule(operation) if rule is not None else None
    return None if form is None else normalize(form, result.shape)


@dataclass(frozen=True)
class _Operation:
    node: fx.Node
    name: str
    result: torch.Tensor
    known: Mapping[fx.Node, IndexForm | None]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        args = self.node.args
        return args[position] if position < len(args) else self.node.kwargs.get(name, default)

    def form(self, argument: Any) -> IndexForm | None:
        """The form of a tensor, or of a number where one broadcasts."""
        if isinstance(argument, bool | int | float):
            return Affine((), argument)
        return self.known.get(argument) if isinstance(argument, fx.Node) else None

    def broadcasts(self, operand: fx.Node) -> bool:
        """Tell if every size of an operand is the result's or the number 1: a symbol might be 1 as well."""
        sizes, results = operand.meta["example_value"].shape, self.result.shape
        pairs = zip(reversed(sizes), reversed(results), strict=False)
        return all(plain_sizes([size]) == [1] or statically_known_true(size == result) for size, result in pairs)

    def constant(self, number: Any) -> IndexForm | None:
        """A number as it is in a tensor of the result's dtype."""
        if not isinstance(number, bool | int | float):
            return None
        return Affine((0,) * self.result.dim(), torch.full((), number, dtype=self.result.dtype).item())


def _arange(operation: _Operation) -> IndexForm | None:
    first, second = operation.argument(0, "start"), operation.argument(1, "end")
    start: Any = 0 if second is None else first
    step = operation.argument(2, "step", 1)
    plain = type(start) is int and type(step) is int and operation.result.dtype in _COUNTING
    return Affine((step,), start) if plain else None


def _filled(operation: _Operation) -> IndexForm | None:
    # `ones` and `zeros` name their number; other functions have it as an argument.
    by_name = {"ones": 1, "zeros": 0}
    number = next((number for name, number in by_name.items() if name in operation.name), None)
    if number is None:
        position = {"new_full": 2, "scalar_tensor": 0, "tensor": 0}.get(operation.name, 1)
        number = operation.argument(position, "fill_value")
    return operation.constant(number)


def _same(operation: _Operation) -> IndexForm | None:
    return operation.form(operation.argument(0, "input"))


def _expanded(operation: _Operation) -> IndexForm | None:
    form = _same(operation)
    return None if form is None else align_dims(form, operation.result.dim())


def _unsqueezed(operation: _Operation) -> IndexForm | None:
    dim, dims = operation.argument(1, "dim"), operation.result.dim()

    def insert(form: Affine) -> Affine:
        position = dim % dims
        return Affine((*form.slopes[:position], 0, *form.slopes[position:]), form.offset)

    return remap_indices(_same(operation), insert)


def _transposed(operation: _Operation) -> IndexForm | None:
    dims = operation.result.dim()
    first, second = operation.argument(1, "dim0", 0) % dims, operation.argument(2, "dim1", 1) % dims

    def swap(form: Affine) -> Affine:
        slopes = [*form.slopes]
        slopes[first], slopes[second] = slopes[second], slopes[first]
        return Affine(tuple(slopes), form.offset)

    return remap_indices(_same(operation), swap)


def _constant_of_other_shape(operation: _Operation) -> IndexForm | None:
    form = _same(operation)
    if not isinstance(form, Affine) or not form.is_constant:
        return None
    return Affine((0,) * operation.result.dim(), form.offset)


def _indexed(operation: _Operation) -> IndexForm | None:
    source: Any
    source, index = operation.node.args
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, fx.Node | list) for item in index):
        is_whole = len(index) == source.meta["example_value"].dim()
        return _constant_of_other_shape(operation) or (_gather(operation, source, index) if is_whole else None)
    value = source.meta["example_value"]
    return remap_indices(operation.form(source), lambda form: _slice(form, index, value.dim()))


def _gather(operation: _Operation, source: fx.Node, index: Sequence[Any]) -> IndexForm | None:
    """Indexing by tensors of whole numbers, one for each dimension, which are broadcast: ``positions[batch, column]``.

    If ``positions[i, j]`` is ``j + 1`` and ``column[k]`` is ``2 * k``, the result at ``k`` is ``2 * k + 1``.
    """
    indices: list[Affine | None] = []
    for item in index:
        value = item.meta["example_value"] if isinstance(item, fx.Node) else None
        if not isinstance(value, torch.Tensor) or value.dtype not in _COUNTING or not operation.broadcasts(item):
            return None
        form = operation.form(item)
        # Negative numbers count from the end.
        if not isinstance(form, Affine) or find_bounds(form, value.shape)[0] < 0:
            indices.append(None)
        else:
            indices.append(drop_unit_slopes(form, value.shape))

    def compose(form: Affine) -> Affine | None:
        slopes, offset = [0] * operation.result.dim(), form.offset
        for slope, tensor_form in zip(form.slopes, indices, strict=True):
            if not slope:  # the same at every index
                continue
            if tensor_form is None:
                return None
            # Their last dimensions are the result's.
            for dim, dim_slope in enumerate(tensor_form.slopes, len(slopes) - len(tensor_form.slopes)):
                slopes[dim] += slope * dim_slope
            offset += slope * tensor_form.offset
        return Affine(tuple(slopes), offset)

    return remap_indices(operation.form(source), compose)


def _slice(form: Affine, index: Sequence[Any], dims: int) -> Affine | None:
    """Indexing by slices, numbers, ``None`` and ``...``; ``None`` where a place is counted from the end."""
    named = sum(item is not None and item is not Ellipsis for item in index)
    trailing = [slice(None)] * (dims - named)
    # An ellipsis stands for as many full slices as dimensions are left.
    position = next((position for position, item in enumerate(index) if item is Ellipsis), None)
    full = [*index, *trailing] if position is None else [*index[:position], *trailing, *index[position + 1 :]]
    slopes, offset, remaining = [], form.offset, list(form.slopes)
    for item in full:
        if item is None:
            slopes.append(0)
            continue
        slope = remaining.pop(0)
        start = item.start or 0 if isinstance(item, slice) else item
        step = (item.step or 1) if isinstance(item, slice) else 1
        # A start that is not known matters only where the values change along this dimension.
        if type(start) is not int or type(step) is not int or start < 0:
            if not slope and isinstance(item, slice):
                start, step = 0, 1
            else:
                return None
        if slope:
            offset += slope * start
        if isinstance(item, slice):
            slopes.append(slope * step)
    return Affine(tuple(slopes), offset)


def _difference(operation: _Operation) -> IndexForm | None:
    form, before = operation.form(operation.argument(0, "input")), operation.argument(3, "prepend")
    is_plain = operation.argument(1, "n", 1) == 1 and operation.argument(4, "append") is None
    if not isinstance(form, Affine) or not is_plain or operation.result.dtype not in _COUNTING:
        return None
    dim = operation.argument(2, "dim", -1) % operation.result.dim()
    slope = form.slopes[dim]
    # With `prepend` the first difference has to be the slope as well: the prepended value is the one before the first.
    if before is not None:
        shape = before.meta["example_value"].shape
        if plain_sizes([shape[dim]]) != [1] or operation.form(before) != drop_unit_slopes(
            Affine(form.slopes, form.offset - slope), shape
        ):
            return None
    return Affine((0,) * len(form.slopes), slope)


def _cumulative_sum(operation: _Operation) -> IndexForm | None:
    form, dim = operation.form(operation.argument(0, "input")), operation.argument(1, "dim")
    if not isinstance(form, Affine) or not form.is_constant or operation.result.dtype not in _COUNTING:
        return None
    slopes = [0] * operation.result.dim()
    slopes[dim] = int(form.offset)
    return Affine(tuple(slopes), int(form.offset))


def _triangle(operation: _Operation) -> IndexForm | None:
    form, diagonal = operation.form(operation.argument(0, "input")), operation.argument(1, "diagonal", 0)
    if not isinstance(form, Affine) or not form.is_constant or type(diagonal) is not int:
        return None
    across = (0,) * (operation.result.dim() - 2)
    # Lower triangle: kept where j - i <= diagonal, that is -i + j - diagonal <= 0.
    slopes = (-1, 1) if operation.name == "tril" else (1, -1)
    kept = Affine((*across, *slopes), -diagonal if operation.name == "tril" else diagonal)
    return Choice(frozenset([kept]), form.offset, type(form.offset)(0))


def _elementwise(operation: _Operation) -> IndexForm | None:
    node, dims = operation.node, operation.result.dim()
    operands = [item for item in (*node.args, *node.kwargs.values()) if isinstance(item, fx.Node | bool | int | float)]
    operand_forms = [operation.form(item) for item in operands]
    if (
        not operand_forms
        or any(form is None for form in operand_forms)
        or not all(map(operation.broadcasts, node.all_input_nodes))
    ):
        return None
    forms = [align_dims(form, dims) for form in operand_forms if form is not None]
    choices = [form for form in forms if isinstance(form, Choice)]
    if not choices:
        if all(isinstance(form, Affine) and form.is_constant for form in forms):
            return Affine((0,) * dims, _compute_element(node, dict(zip(operands, _offsets(forms), strict=True))))
        return _combine_affine(operation, forms)
    # Two different regions: only their intersection has a form, which a boolean AND is.
    if len({choice.conditions for choice in choices}) > 1:
        conditions = [list_conditions(form) for form in forms]
        if operation.name not in _AND or operation.result.dtype is not torch.bool or None in conditions:
            return None
        return Choice(
            frozenset(
                condition
                for form_conditions in conditions
                if form_conditions is not None
                for condition in form_conditions
            ),
            True,
            False,
        )
    if not all(isinstance(form, Choice) or form.is_constant for form in forms):
        return None
    # Both constants of the choice are computed by the operation itself, so its rounding and dtypes are exact.
    inside, outside = (
        _compute_element(node, dict(zip(operands, numbers, strict=True)))
        for numbers in (
            [form.inside if isinstance(form, Choice) else form.offset for form in forms],
            [form.outside if isinstance(form, Choice) else form.offset for form in forms],
        )
    )
    return Choice(choices[0].conditions, inside, outside)


def _offsets(forms: Sequence[IndexForm]) -> list[Number]:
    return [form.offset for form in forms if isinstance(form, Affine)]


def _compute_element(node: fx.Node, numbers: Mapping[Any, Number]) -> Number:
    """Compute an elementwise operation on one element of each operand."""

    def element(operand: fx.Node) -> torch.Tensor:
        value = operand.meta["example_value"]
        # A tensor with dimensions takes part in the promotion of dtypes, one without does not.
        return torch.full((1,) * min(value.dim(), 1), numbers[operand], dtype=value.dtype, device="cpu")

    result = run_on_host(node, {operand: element(operand) for operand in node.all_input_nodes})
    return result.item()


def run_on_host(node: fx.Node, values: Mapping[fx.Node, torch.Tensor]) -> torch.Tensor:
    """Run a pure operation of Dynamo's graph on the CPU."""
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda operand: values[operand])
    if node.target == "to":  # by position it may be a device, by its name too
        args = (args[0], *("cpu" if isinstance(item, str | torch.device) else item for item in args[1:]))
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu"}
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def _combine_affine(operation: _Operation, forms: Sequence[IndexForm]) -> IndexForm | None:
    """Sums and comparisons of integers that depend on their indices."""
    values = [item.meta["example_value"] for item in operation.node.all_input_nodes]
    left, right = forms[0], forms[-1]
    if not all(value.dtype in _COUNTING for value in values) or len(forms) > 2 or len(operation.node.kwargs):
        return None
    if not isinstance(left, Affine) or not isinstance(right, Affine):
        return None
    numbers = [*left.slopes, left.offset, *right.slopes, right.offset]
    # Small integers only: no overflow, and exact in every floating-point dtype that they may be cast to.
    if not all(type(number) is int and abs(number) < _LARGEST for number in numbers):
        return None
    name, shape = operation.name, operation.result.shape
    if len(forms) == 1:
        return left if name in ("to", "long", "int") and operation.result.dtype in _COUNTING else None
    if name in _COMPARED:
        swapped, strict = _COMPARED[name]
        # a <= b is a - b <= 0; a < b is a - b + 1 <= 0 for integers.
        return Choice(frozenset([_sum(*((right, left) if swapped else (left, right)), -1, strict)]), True, False)
    if name in ("eq", "ne"):
        difference = _sum(left, right, -1, 0)
        lower, upper = find_bounds(difference, shape)
        apart = lower > 0 or upper < 0
        return Affine((0,) * len(shape), name == "ne") if apart else None
    return _sum(left, right, {"add": 1, "sub": -1}[name], 0) if name in ("add", "sub") else None


_COMPARED = {"le": (False, 0), "lt": (False, 1), "ge": (True, 0), "gt": (True, 1)}
"""For the difference to be at most 0: if the operands change places, and what is added."""


def _sum(left: Affine, right: Affine, sign: int, beyond: int) -> Affine:
    slopes = tuple(first + sign * second for first, second in zip(left.slopes, right.slopes, strict=True))
    return Affine(slopes, left.offset + sign * right.offset + beyond)


_COUNTING = (torch.int32, torch.int64)
"""Dtypes in which no index of a tensor overflows or is rounded."""

_LARGEST = 1 << 24
"""Beyond any length; sums of larger numbers might overflow."""

_AND = frozenset(["and", "__and__", "logical_and", "bitwise_and", "mul"])

_RULES: Mapping[str, Callable[[_Operation], IndexForm | None]] = {
    "arange": _arange,
    **dict.fromkeys(("ones", "ones_like", "new_ones", "zeros", "zeros_like", "new_zeros"), _filled),
    **dict.fromkeys(("full", "full_like", "new_full", "tensor", "scalar_tensor"), _filled),
    **dict.fromkeys(("clone", "contiguous", "detach"), _same),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expanded),
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(("transpose", "swapaxes", "t"), _transposed),
    **dict.fromkeys(("view", "reshape", "flatten", "repeat", "squeeze", "permute"), _constant_of_other_shape),
    "getitem": _indexed,
    "diff": _difference,
    "cumsum": _cumulative_sum,
    **dict.fromkeys(("tril", "triu"), _triangle),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill"), _elementwise),
    **dict.fromkeys(("and", "or", "xor", "invert", "inv", "__and__", "__or__", "__invert__"), _elementwise),
    **dict.fromkeys(("logical_and", "logical_or", "logical_xor", "logical_not"), _elementwise),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _elementwise),
    **dict.fromkeys(("to", "bool", "int", "long", "float", "half", "double", "bfloat16"), _elementwise),
    **dict.fromkeys(("add", "sub", "mul", "neg"), _elementwise),
}

_PURE = frozenset(_RULES).union(
    ("abs", "ceil", "clamp", "div", "floor", "floor_divide", "floordiv", "fmod", "maximum", "minimum", "mod", "pow"),
    ("remainder", "round", "rsub", "truediv", "__radd__", "__rsub__", "all", "any", "argsort", "max", "min", "sum"),
    ("cat", "gather", "index_select", "linspace", "movedim", "narrow", "outer", "pad", "repeat_interleave", "roll"),
    ("select", "stack", "type_as", "unfold"),
)
"""Operations that read their operands alone and write nothing, by name, without the underscore of ``operator.and_``."""
