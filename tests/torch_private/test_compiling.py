"""Compiled code checks what opaque kernels return in each call, and its inputs in the first one."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch.fx.experimental.proxy_tensor import make_fx

from roundpipe_fx import torch_private
from roundpipe_fx.torch_private import inductor, inductor_code


@pytest.fixture(autouse=True)
def _fresh_code() -> Iterator[None]:
    """Nothing is taken from Inductor's cache, where other code for the same graph may be."""
    with torch._inductor.utils.fresh_cache():
        yield


def _graph(
    function: Callable[..., Any], shapes: Sequence[tuple[int, ...]], tracing_mode: str = "fake"
) -> tuple[fx.GraphModule, list[Any]]:
    """A graph, and the fake tensors of its inputs."""
    graph = make_fx(function, tracing_mode=tracing_mode)(*map(torch.empty, shapes))
    return graph, [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]


def _sum_and_eigenvalues(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x + y).exp() * 3, torch.ops.aten._linalg_eigvals(y)


def _checked(code: str) -> list[str]:
    return re.findall(r"assert_size_stride\((\w+)", code)


def test_results_of_opaque_kernels_are_checked_and_inputs_are_not() -> None:
    code = inductor_code(*_graph(_sum_and_eigenvalues, [(4, 4), (4, 4)]), {})
    checked = _checked(code)
    assert checked and all(name.startswith("buf") for name in checked), code


def test_code_of_others_checks_its_inputs() -> None:
    """Also for the graph that was compiled before: Inductor's cache has both."""
    graph, examples = _graph(lambda x, y: ((x + y).exp() * 3,), [(4, 4), (4, 4)])
    ours = inductor(graph, examples, {})
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    compiled = torch.compile(lambda x, y: (x + y).exp() * 3)
    expected, texts = torch._inductor.utils.run_and_get_code(compiled, x, y)
    assert len(_checked("".join(texts))) == 2
    torch.testing.assert_close(ours([x, y])[0], expected)


def test_the_first_call_checks_inputs() -> None:
    graph, examples = _graph(lambda x, y: ((x + y).exp(),), [(4, 3), (4, 3)])
    code = inductor(graph, examples, {})
    x = torch.randn(4, 3)
    with pytest.raises(AssertionError, match="stride"):
        code([x, torch.randn(3, 4).t()])
    with pytest.raises(AssertionError, match="size"):
        code([x, torch.randn(4, 4)])
    for _ in range(2):
        torch.testing.assert_close(code([x, x])[0], (x + x).exp())


def test_code_for_symbolic_sizes_checks_its_inputs() -> None:
    code = inductor_code(*_graph(lambda x, y: ((x + y).exp(),), [(5, 3), (5, 3)], "symbolic"), {})
    assert len(_checked(code)) == 2, code


def test_what_is_written_by_other_threads_keeps_its_checks() -> None:
    written: list[str] = []
    plain = PythonWrapperCodegen.codegen_input_size_asserts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PythonWrapperCodegen, "codegen_input_size_asserts", lambda self: written.append("checks"))
        with torch_private.compiling._without_checks_of_inputs():
            PythonWrapperCodegen.codegen_input_size_asserts(None)
            assert not written
            thread = threading.Thread(target=PythonWrapperCodegen.codegen_input_size_asserts, args=(None,))
            thread.start()
            thread.join()
            assert written == ["checks"]
    assert PythonWrapperCodegen.codegen_input_size_asserts is plain
