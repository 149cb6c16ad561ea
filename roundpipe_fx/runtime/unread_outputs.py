"""Unread outputs: tensors without memory, which a model returns for outputs that its caller is expected not to read.

::

    forward program         ┌─ hidden ──▶ UnreadTensor: shape, dtype, device of the scores ──▶ caller
                            └─ words ───▶ read: mm(hidden, words)

Its shape may be looked at, it may be detached, converted to another dtype, moved, or put together with others of its
kind, as a pipeline does with those of microbatches. Anything else reads it: it is computed then, once, by the
operations that the forward would have run, and is a tensor like any other. Autograd sees none of this. An output that
is still held when the backward begins is computed too, since the optimizer will change the weights. If something has
changed them before, reading it is an error.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from roundpipe_fx.ir.unread_output import UnreadOutput
from roundpipe_fx.runtime.compiled_loops import Boxed
from roundpipe_fx.torch_private import WithoutStorage, tree_leaves, tree_map_only, without_modes, without_storage

aten = torch.ops.aten


class UnreadOutputs:
    """Returns unread outputs of a graph's calls, and computes them if they are held.

    Args:
        outputs: by number.
        see: called with the number of an output that is read.
    """

    def __init__(self, outputs: Mapping[int, UnreadOutput], see: Callable[[int], None]) -> None:
        self._outputs = outputs
        self._see = see
        self._values: weakref.WeakSet[_Value] = weakref.WeakSet()

    def forward(self, run: Boxed) -> Boxed:
        """Wrap the forward program."""

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            inputs = self.inputs_of(arguments)  # which the program clears
            return tuple(self.leave_unread(run(arguments), inputs))

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def inputs_of(self, arguments: Sequence[Any]) -> dict[int, list[Any]]:
        """Select, by output, the arguments of a forward that its unread outputs are computed from."""
        return {position: [arguments[i] for i in output.inputs] for position, output in self._outputs.items()}

    def leave_unread(self, results: Sequence[Any], inputs: Mapping[int, Sequence[Any]]) -> list[Any]:
        """Return the results of a forward with tensors without memory for those that stand for unread outputs.

        Args:
            inputs: the arguments of the forward that each is computed from, by :meth:`inputs_of`.
        """
        returned = list(results)
        for position, output in self._outputs.items():
            operands = [returned[position], *inputs[position]]
            value = _Value(output, operands, position, functools.partial(self._see, position))
            self._values.add(value)
            returned[position] = _make_unread(value.like, output.value.device, value.read)
        return returned

    @property
    def positions(self) -> frozenset[int]:
        """Numbers of the outputs."""
        return frozenset(self._outputs)

    @property
    def held(self) -> frozenset[int]:
        """Numbers of the outputs that callers still hold, of any call."""
        return frozenset(value.position for value in self._values)

    def compute_held(self) -> None:
        """Compute the outputs that callers still hold."""
        for value in [*self._values]:
            value.compute()

    def backward(self, run: Boxed) -> Boxed:
        """Wrap the backward program: outputs that callers still hold are computed before it runs."""

        def call(arguments: list[Any]) -> tuple[Any, ...]:
            self.compute_held()
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


class _Value:
    """The value of an output, which is computed when it is first read.

    Args:
        output: has the module that computes it.
        operands: the value in its stead, and inputs of the graph.
        position: its number among the graph's outputs.
        see: called when somebody reads it.

    Attributes:
        like: a tensor without numbers, of its shape, strides and dtype.
    """

    def __init__(self, output: UnreadOutput, operands: Sequence[Any], position: int, see: Callable[[], None]) -> None:
        self._output, self._operands, self.position, self._see = output, operands, position, see
        self._versions = _versions(operands)
        self._computed: torch.Tensor | None = None
        self.like = _like(output, operands)

    def read(self) -> torch.Tensor:
        """The value."""
        if self._computed is None:
            self._see()
        return self.compute()

    def compute(self) -> torch.Tensor:
        """Compute the value if nobody has read it.

        Raises:
            RuntimeError: what it is computed from has changed.
        """
        if self._computed is None:
            if _versions(self._operands) != self._versions:
                raise RuntimeError(
                    "roundpipe_fx: this output of the model was not computed, since earlier steps dropped it unread, "
                    "and the weights that it is computed from have changed since. Read it before the weights change, "
                    'or compile with outputs="dropped" or "held".'
                )
            device = self._operands[0].device
            with without_modes(), torch.no_grad(), torch.autocast(device.type, enabled=False):
                self._computed = self._output.module(*self._on_traced_devices())
            self._operands = ()
        return self._computed

    def _on_traced_devices(self) -> Iterator[Any]:
        """The operands; weights of an offloaded model are on the host, and copies of them take their places."""
        placeholders = self._output.module.graph.find_nodes(op="placeholder")
        for node, operand in zip(placeholders, self._operands, strict=True):
            yield operand.to(node.meta["val"].device) if isinstance(operand, torch.Tensor) else operand


def _like(output: UnreadOutput, operands: Sequence[Any]) -> torch.Tensor:
    if all(isinstance(size, int) for size in (*output.value.shape, *output.value.stride())):
        return _on_meta(output.value)
    with torch.no_grad():
        like = output.module(*tree_map_only(torch.Tensor, lambda operand: operand.to("meta"), list(operands)))
    assert isinstance(like, torch.Tensor)
    return like


def _on_meta(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def _versions(operands: Sequence[Any]) -> list[int]:
    return [operand._version for operand in operands if isinstance(operand, torch.Tensor)]


class UnreadTensor(WithoutStorage):
    """A tensor that is computed when it is read.

    Attributes:
        read: computes it.
    """

    read: Callable[[], torch.Tensor]

    @classmethod
    def run(cls, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, now or when its result is read."""
        tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
        later = operator in _LATER and not kwargs.keys() - {"dtype", "device", "layout", "non_blocking"}
        if later and all(isinstance(value, UnreadTensor) for value in tensors):
            on_meta = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
            like = operator(*tree_map_only(UnreadTensor, _on_meta, args), **on_meta)
            device = torch.device(kwargs.get("device", tensors[0].device))
            return _make_unread(like, device, lambda: _run_now(operator, args, kwargs))
        return _run_now(operator, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.read(), memo)


_LATER = (aten.detach.default, aten.alias.default, aten._to_copy.default, aten.cat.default)
"""Operations that do not read a tensor yet."""


def _run_now(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(UnreadTensor, lambda unread: unread.read(), (args, kwargs))
    return operator(*args, **kwargs)


def _make_unread(like: torch.Tensor, device: torch.device, read: Callable[[], torch.Tensor]) -> UnreadTensor:
    made = without_storage(UnreadTensor, like, device)
    # Who reads it again finds what was written into it meanwhile.
    made.read = functools.cache(read)
    return made


def _make_reading_method(name: str) -> Callable[..., Any]:
    """A method that looks at a tensor's memory."""

    def method(self: UnreadTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.read(), name)(*args, **kwargs)

    return method


for _name in ("numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "share_memory_"):
    setattr(UnreadTensor, _name, _make_reading_method(_name))
