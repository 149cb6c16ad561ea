"""Donated inputs: a compiled backward may write over what dies in the call.

A forward's value that the backward reads last, in a kernel that makes one of the same size, gives its memory to that
result. At a language model's head, the gradient of the scores is written over the scores::

    scores (134 MB) ─▶ kernel ─▶ gradient (134 MB)    →    scores (134 MB) ─▶ kernel ─▶ gradient, in the same memory

Only the call can know whether a value dies in it: the caller may hold an output or a view of it, and autograd holds
everything where the graph is retained. So each call looks who refers to a value, and code is generated for those that
nobody else refers to, when they are first seen::

    loss.backward()                      scores donated
    loss.backward(retain_graph=True)     nothing donated: other code
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.fusion import is_fusible
from roundpipe_fx.ir.joint_graph import is_view
from roundpipe_fx.runtime.compiled_loops import Boxed
from roundpipe_fx.torch_private import ForkedLock, is_sole_reference

_WORTH = 1 << 20
"""Bytes from which on a value is worth code of its own."""
_CODES = 3
"""Sets of donated values for which code is generated; after these, for one that needs none of them."""


def find_donatable(module: fx.GraphModule, computed: Collection[int]) -> list[int]:
    """Inputs that a result of the module may be written over.

    Args:
        computed: positions of inputs that stage modules have computed. Others, as those of the user, may share memory
            with objects that are no tensors.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    # A donation pays only if some result has exactly this size: the compiler reuses whole buffers.
    result_sizes = {_bytes(node) for node in module.graph.nodes if node.op == "call_function" and not is_view(node)}
    return [
        position
        for position in computed
        if _bytes(inputs[position]) >= _WORTH
        and _bytes(inputs[position]) in result_sizes
        and _is_read_in_kernel(inputs[position])
    ]


def _bytes(node: fx.Node) -> int:
    """Of a tensor that fills its memory; 0 for another."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return 0
    # Views and tensors with an offset share memory with others.
    if not all(isinstance(size, int) for size in (*value.shape, *value.stride())) or value.storage_offset():
        return 0
    size = value.numel() * value.dtype.itemsize
    return size if size == value.untyped_storage().nbytes() else 0


def _is_read_in_kernel(node: fx.Node) -> bool:
    return any(_is_read_in_kernel(user) if is_view(user) else is_fusible(user) for user in node.users)


def compile_by_donation(
    positions: Collection[int], compiled: Callable[[Collection[int]], Boxed], compiling: ForkedLock
) -> Boxed:
    """Compile a stage module for the inputs that die in a call, when it is called.

    Args:
        compiled: compiles the module for inputs that may be written over.
        compiling: held while something is compiled.

    Returns:
        the stage, boxed.
    """
    codes: dict[frozenset[int], Boxed] = {}

    def call(arguments: list[Any]) -> tuple[Any, ...]:
        dying = frozenset(position for position in positions if is_sole_reference(arguments, position))
        with compiling:
            if dying not in codes:
                # After a few variants, the largest donation that is a subset of what dies here: always correct, if not
                # the best.
                if len(codes) >= _CODES:
                    dying = max((known for known in codes if known <= dying), key=len, default=frozenset())
                if dying not in codes:
                    codes[dying] = compiled(dying)
            code = codes[dying]
        return code(arguments)

    return call
