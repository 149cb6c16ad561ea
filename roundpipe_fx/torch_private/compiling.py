"""Compiling graphs: FX code generation and Inductor."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor.exc import InductorError
from torch._inductor.inductor_prims import _low_memory_max_pool_offsets_to_indices as positions_of_offsets
from torch._inductor.inductor_prims import _low_memory_max_pool_with_offsets as maxima_with_offsets

from roundpipe_fx.torch_private.forks import ForkedLock
from roundpipe_fx.torch_private.memory_profile import compiled_calls_are_seen

__all__ = [
    "InductorError",
    "boxed_codegen",
    "boxed_false",
    "graph_module",
    "has_kernel",
    "inductor",
    "inductor_code",
    "inductor_decomposition",
    "inductor_settings",
    "inductor_wants_channels_last",
    "is_traced",
    "maxima_with_offsets",
    "positions_of_offsets",
    "without_wrapper",
]


def is_traced() -> bool:
    """Return whether ``torch.jit.trace`` or FX's symbolic tracing is at work."""
    return torch._C._is_tracing() or torch.fx._symbolic_trace.is_fx_symbolic_tracing()


def boxed_codegen() -> Any:
    """FX code generation for functions that take one list and clear it, so that arguments can be freed inside."""
    from torch.fx.graph import _BoxedCodeGen

    return _BoxedCodeGen()


def graph_module(root: Any, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """An ``fx.GraphModule`` whose code is generated when it is first needed, which for most modules is never.

    Args:
        root: has the attributes that the graph refers to.
        name: name of its class.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=name)


def inductor(
    module: fx.GraphModule,
    run: Callable[..., Any],
    example_inputs: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
    donated: Collection[int] = (),
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a functional ATen graph with Inductor. The result is boxed.

    Random numbers are those of eager mode (``fallback_random``), so that stages agree with ``aot_eager`` up to
    rounding; outputs have the strides that they have in the graph, for which the next stage was compiled.

    Args:
        run: runs the module, and is traced.
        example_inputs: fake tensors of the inputs' shapes, strides and devices.
        decompositions: of operators, which take precedence over Inductor's own.
        donated: positions of inputs that the code may write over. Inductor's cache does not know them, and would give
            code for others; so they are part of the tag of its keys.
        options: names and values of Inductor's settings.

    Raises:
        InductorError: it cannot compile the graph.
    """
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx

    example_inputs = _with_names(example_inputs)
    mode = detect_fake_mode(example_inputs)
    context = TracingContext(mode)
    caching: Any = torch.compiler.config
    # Donated inputs change the code and no graph, so they must be part of the key of Inductor's cache.
    tag = caching.cache_key_tag
    if donated:
        metadata: Any = types.SimpleNamespace(bw_donated_idxs=sorted(donated), static_input_indices=[])
        context.fw_metadata = metadata
        tag += f"roundpipe_fx donated {sorted(donated)}"
    settings = {**(options or {}), "fallback_random": True}
    if _has_sizes_of_unknown(example_inputs):
        settings["fx_graph_cache"] = False
    # A separate tracing context: Inductor reports output strides to the active one, which is the whole model's.
    with (
        torch.no_grad(),
        tracing(context),
        V.set_fake_mode(mode),
        _use_lazy_graph_module(True),  # as within Dynamo: keys of Inductor's cache depend on it
        config.patch(settings),
        caching.patch(cache_key_tag=tag),
    ):
        # Decompositions are applied here: `compile_fx_inner` takes a graph that has been lowered.
        retrace = make_fx(
            run, decomposition_table={**select_decomp_table(), **decompositions}, _allow_non_fake_inputs=True
        )
        with mode if mode is not None else contextlib.nullcontext():
            lowered = retrace(*example_inputs)
        output = lowered.graph.output_node()
        results: Any = module.graph.output_node().args[0]
        values = [result.meta.get("val") if isinstance(result, fx.Node) else None for result in results]
        # Without these Inductor may choose other strides for results, which the next stage does not expect.
        output.meta["original_output_strides"] = [
            value.stride() if isinstance(value, torch.Tensor) else None for value in values
        ]
        output.meta["user_visible_output_idxs"] = list(range(len(values)))
        # Only a backward may write over its inputs.
        phase: dict[str, Any] = {"is_inference": False, "is_backward": bool(donated)}
        code = compile_fx_inner(lowered, list(example_inputs), cudagraphs=boxed_false(), **phase)
    return _called_directly(code)


def _called_directly(code: Any) -> Callable[..., Any]:
    """Leave out, from the second call on, what the object around compiled code does in each call.

    That is for autotuning, whose results the first call stores, for profilers and for records of calls::

        program ─▶ object (autotuning, metrics, profilers) ─▶ code        the first call, and when someone looks
        program ───────────────────────────────────────────▶ code        the others
    """
    if not hasattr(code, "current_callable"):
        return code
    was_called = False

    def call(inputs: Any) -> Any:
        nonlocal was_called
        if was_called and not compiled_calls_are_seen():
            return code.current_callable(inputs)
        was_called = True
        return code(inputs)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _with_names(examples: Sequence[Any]) -> list[Any]:
    """Inputs of which each number that is computed from others has a symbol of its own.

    Inductor's code names the symbols of which a number is made (``s0 / 100``), and finds only those that are an input,
    or a size of one. A whole number that sizes are made of too is one of the sizes, and stays.
    """
    named: set[Any] = set()
    size_symbols: set[Any] = set()
    for value in examples:
        # Symbols that are an input or a size of one have names in the code; expressions of several have none.
        sizes = [size for size in (*value.shape, *value.stride()) if _is_symbolic(size)] if _is_strided(value) else []
        size_symbols.update(*(size.node.expr.free_symbols for size in sizes))
        numbers = [*sizes, *([value] if _is_symbolic(value) else [])]
        named.update(number.node.expr for number in numbers if number.node.expr.is_Symbol)

    def with_name(value: Any) -> Any:
        if not _is_symbolic(value) or value.node.expr.free_symbols <= named:
            return value
        shapes = value.node.shape_env
        with shapes.ignore_fresh_unbacked_symbols():
            if isinstance(value, torch.SymFloat):
                return shapes.create_unbacked_symfloat()
            return value if value.node.expr.free_symbols <= named | size_symbols else shapes.create_unbacked_symint()

    return [with_name(value) for value in examples]


def _has_sizes_of_unknown(examples: Sequence[Any]) -> bool:
    """Test for a number among the inputs that is computed from a size which is no input.

    Inductor's cache looks such a size up by the tensor that the model got, when it compares the numbers of a call with
    those that code was written for, and fails with a ``KeyError``.
    """
    numbers = [value.node.expr for value in examples if isinstance(value, torch.SymInt)]
    symbols = {expression for expression in numbers if expression.is_Symbol}
    return any(not expression.free_symbols <= symbols for expression in numbers)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


_writing = ForkedLock()


def inductor_code(
    module: fx.GraphModule,
    run: Callable[..., Any],
    example_inputs: Sequence[Any],
    decompositions: Mapping[Any, Callable[..., Any]],
    donated: Collection[int] = (),
    options: Mapping[str, Any] | None = None,
) -> str:
    """The Python code that Inductor writes for a graph, with kernels that are not compiled.

    Inductor's cache of graphs keeps it, as of any graph; who compiles the same graph later finds the code written, and
    only the kernels are left to compile.

    Args:
        run: runs the module, and is traced.
        example_inputs: fake tensors of the inputs' shapes, strides and devices.

    Returns:
        the text of a module with a function, or a method, ``call``, which allocates, frees and calls the kernels.
    """
    from unittest import mock

    from torch._inductor.codecache import PyCodeCache

    written: list[str] = []
    load, thread = PyCodeCache.load_by_key_path, threading.get_ident()

    def note(key: str, path: str, linemap: Any = None, attrs: Any = None, **settings: Any) -> Any:
        # What Inductor tries out while it writes has no attributes.
        # Other threads may load code meanwhile, and are not ours to intercept.
        if threading.get_ident() != thread or attrs is None:
            return load(key, path, linemap, attrs, **settings)
        with open(path) as file:
            written.append(file.read())
        # Stands for the loaded module: nothing of it is called, as only the text is wanted.
        return types.SimpleNamespace(call=lambda *_: None, __file__=path)

    with (
        _writing,  # what one thread has put in place, another one would put back
        mock.patch.object(PyCodeCache, "load_by_key_path", note),
    ):
        inductor(module, run, example_inputs, decompositions, donated, options)
    return written[-1]


def inductor_wants_channels_last(module: fx.GraphModule, on_cpu: bool, options: Mapping[str, Any]) -> bool:
    """Return whether Inductor would compute the convolutions of a graph with channels innermost in memory.

    Args:
        module: a graph with fake tensors.
        on_cpu: whether it runs on a CPU, where the answer is always yes; elsewhere sizes of the convolutions decide.
        options: names and values of Inductor's settings.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    with config.patch(dict(options)), torch.backends.mkldnn.flags(enabled=on_cpu and torch.backends.mkldnn.enabled):
        return GraphLowering.decide_layout_opt(module, is_inference=False)


def inductor_settings() -> list[str]:
    """Names of Inductor's settings."""
    return list(torch._inductor.list_options())


def inductor_decomposition(node: fx.Node) -> fx.Graph:
    """The operations that Inductor computes an operation with.

    Args:
        node: calls an operator of PyTorch on fake tensors.

    Returns:
        a graph with an input for each node that it reads, in order.
    """
    import torch._inductor.lowering  # which some decompositions refer to
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    operands = node.all_input_nodes
    values = [operand.meta["val"] for operand in operands]

    def run(*arguments: Any) -> Any:
        values = dict(zip(operands, arguments, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with torch.no_grad(), values[0].fake_mode:
        return make_fx(run, decomposition_table=select_decomp_table())(*values).graph


def boxed_false() -> Any:
    """Inductor's value for "no CUDA graphs"."""
    from torch._inductor.utils import BoxedBool

    return BoxedBool(False)


def has_kernel(operator: torch._ops.OpOverload, device: str) -> bool:
    """Return whether an operator has a kernel for a device, rather than a decomposition."""
    key = getattr(torch._C.DispatchKey, device.upper(), None)
    return key is not None and operator.has_kernel_for_dispatch_key(key)


def without_wrapper(target: Callable[..., Any]) -> Callable[..., Any]:
    """The function that an operator calls, which saves a Python call per operation; other targets unchanged."""
    return target._op if type(target) is torch._ops.OpOverload else target
