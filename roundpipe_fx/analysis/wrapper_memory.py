"""Wrapper memory: what the code that Inductor writes for a stage module does to memory.

Inductor orders operations, fuses them into kernels and lets results overwrite what dies; what it decided stands in the
*wrapper*, the Python function that calls the kernels::

    buf0 = empty_strided_cpu((1024, 256), (256, 1), torch.float32)     allocates
    cpp_fused_0(arg0_1, buf0)
    del arg0_1                                                         frees
    buf1 = buf0; del buf0  # reuse
    extern_kernels.mm(arg1_1, buf1, out=buf2)

The wrapper is run on fake tensors, with kernels that do nothing. A dispatch mode sees what is allocated, and weak
references to the storages see what is freed::

    event 0   makes buf0
    event 1   makes buf2     reads buf0, which is gone before event 2
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from roundpipe_fx.analysis.program_events import FollowedModule, FollowedOperation
from roundpipe_fx.analysis.storage_ids import OUTSIDE
from roundpipe_fx.torch_private import StorageReference, TorchDispatchMode, fake_mode, tree_leaves, tree_map_only

_COMPILER = "torch._inductor.async_compile"
"""Imports from this module make kernels."""
_ALLOCATES = "empty_strided_"

Workspaces = Mapping[str, Callable[[fx.Node], int]]
"""By an operator's name, the bytes that a call allocates beside its results, of a node with the call's operands."""


class Layout(NamedTuple):
    """Sizes, strides, element type and device of a tensor that is passed in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def follow_wrapper(
    code: str, inputs: Sequence[Any], workspaces: Workspaces, storages: Sequence[Sequence[int]]
) -> FollowedModule:
    """Run a wrapper without its kernels, and note what it allocates and frees.

    Args:
        code: Inductor's, of a module.
        inputs: what the function is called with: layouts of tensors, and numbers.
        workspaces: of operators that allocate more than their results, by name.
        storages: for each input, the numbers of its storages, in the order in which they come in.

    Raises:
        Exception: whatever the code raises where it needs numbers that fake tensors do not have.
    """
    events = _StorageEvents(workspaces)
    # Fake tensors have sizes and storages, and no memory: a wrapper of 80 GB is followed on a laptop.
    with fake_mode():
        arguments: list[Any] = []
        for value, leaves in zip(inputs, storages, strict=True):
            if not isinstance(value, Layout):
                arguments.append(value)
                continue
            # Inputs get the numbers of the graph's own storages, so that what the wrapper frees is found in the
            # caller's count.
            arguments.append(torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device))
            events.register(arguments[-1], leaves[0])
        function = _load_wrapper(code)
        with events:
            returned = function(arguments)
            # What died after the last call is only seen here.
            events.note_freed()
            leaves_of = [[events.number(value)] if isinstance(value, torch.Tensor) else [] for value in returned]
    return FollowedModule(events.operations, events.sizes, leaves_of)


class _StorageEvents(TorchDispatchMode):
    """Records storages as they are made and freed: an operation reads what is gone before the next one."""

    supports_higher_order_operators = True

    def __init__(self, workspaces: Workspaces) -> None:
        super().__init__()
        # An event before the first call: inputs that are freed at once die with it.
        self.operations = [FollowedOperation(-1, [], [], 0)]
        self.sizes: list[int] = []
        self._workspaces = workspaces
        self._incoming = 0
        # Weak references: the wrapper alone decides how long a buffer lives.
        self._alive: dict[int, tuple[StorageReference, int]] = {}

    def register(self, value: torch.Tensor, number: int) -> None:
        storage = value.untyped_storage()
        self._incoming = max(self._incoming, number + 1)
        self._alive[storage._cdata] = StorageReference(storage), number

    def number(self, value: torch.Tensor) -> int:
        return self._alive[value.untyped_storage()._cdata][1]

    def note_freed(self) -> None:
        # Each death belongs to the operation before it. ``del arg0_1`` after ``cpp_fused_0`` frees with the kernel that
        # read it last.
        for key, (reference, number) in list(self._alive.items()):
            if reference.expired():
                del self._alive[key]
                if number != OUTSIDE:
                    self.operations[-1].reads.append(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_freed()
        results = func(*args, **(kwargs or {}))
        allocated = []
        for value in tree_leaves(results):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            # A storage that is known is a view, or an output that was passed in; only new ones are allocations.
            if storage._cdata not in self._alive:
                number = self._incoming + len(self.sizes)
                self.sizes.append(storage.nbytes())
                self._alive[storage._cdata] = StorageReference(storage), number
                allocated.append(number)
        measure = self._workspaces.get(func.name())
        workspace = 0 if measure is None else measure(_node_of_call(func, args, kwargs or {}, results))
        if allocated or workspace:
            self.operations.append(FollowedOperation(-1, [], allocated, workspace))
        return results


def _node_of_call(func: Any, args: Any, kwargs: Any, results: Any) -> fx.Node:
    """A call as a node: its operands have the layouts that the code gives them, which may not be those of the graph."""
    graph = fx.Graph()

    def placeholder(operand: torch.Tensor) -> fx.Node:
        node = graph.placeholder("operand")
        node.meta["val"] = _drop_storage(operand)
        return node

    args, kwargs = tree_map_only(torch.Tensor, placeholder, (args, kwargs))
    node = graph.call_function(func, args, kwargs)
    node.meta["val"] = tree_map_only(torch.Tensor, _drop_storage, results)
    return node


def _drop_storage(value: torch.Tensor) -> torch.Tensor:
    """A fake tensor of the same layout: what a node holds must not keep the code's buffers alive."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _load_wrapper(code: str) -> Callable[[list[Any]], Sequence[Any]]:
    """Load the function ``call`` of a wrapper's code, whose kernels do nothing."""
    tree = ast.parse(code)
    # The import would replace `_Kernels` by the class that compiles kernels, and the `if` at the end benchmarks the
    # module.
    tree.body = [line for line in tree.body if not (isinstance(line, ast.ImportFrom) and line.module == _COMPILER)]
    tree.body = [line for line in tree.body if not isinstance(line, ast.If)]
    names: dict[str, Any] = {"AsyncCompile": _Kernels, "__name__": "wrapper"}
    exec(compile(tree, "wrapper", "exec"), names)
    for name in [*names]:
        # Allocators of devices that this machine lacks (``empty_strided_cuda``) are replaced, too: fake tensors need
        # none.
        if name.startswith(_ALLOCATES):
            names[name] = _make_allocator(name.removeprefix(_ALLOCATES).partition("_")[0])
    names |= {
        "assert_size_stride": _accept_check,
        "assert_alignment": _accept_check,
        "reinterpret_tensor": _reinterpret,
    }
    call: Callable[[list[Any]], Sequence[Any]] = names["call"]
    return call


class _Kernels:
    """Stands for what compiles kernels."""

    def __getattr__(self, name: str) -> Callable[..., _Kernel]:
        return lambda *_, **__: _Kernel()

    def wait(self, names: dict[str, Any]) -> None:
        """Nothing is compiled."""


class _Kernel:
    """Stands for a kernel, and does nothing."""

    def __call__(self, *_: Any, **__: Any) -> None:
        """As kernels in C++ are called."""

    def run(self, *_: Any, **__: Any) -> None:
        """As those of Triton are."""


def _accept_check(*_: Any, **__: Any) -> None:
    """Stands for a check."""


def _make_allocator(device: str) -> Callable[..., torch.Tensor]:
    def allocate(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    return allocate


def _reinterpret(value: torch.Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return value.as_strided(shape, stride, value.storage_offset() + offset)
