"""Stage modules whose collectives stay out of what a stage compiler compiles."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from roundpipe_fx.ir.options import Inductor
from roundpipe_fx.runtime.compiled_parts import compile_in_parts, split_at_collectives
from roundpipe_fx.torch_private import boxed_codegen

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _summed(x: torch.Tensor) -> torch.Tensor:
    started = torch.ops._c10d_functional.all_reduce.default(x, "sum", dist.group.WORLD.group_name)
    return torch.ops._c10d_functional.wait_tensor.default(started)


def _module(function: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.set_codegen(boxed_codegen())
    return fx.GraphModule(module, module.graph, "stage_0_forward")


def _interpreted(module: fx.GraphModule, _examples: Any = None) -> Callable[[list[Any]], Any]:
    def call(arguments: list[Any]) -> Any:
        return fx.Interpreter(module).boxed_run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def layer(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    for _ in range(2):
        x = _summed(aten.mm.default(x, w).tanh()).sin()
    return (x,)


def test_as_text_equal_parts_are_compiled_once() -> None:
    made: list[fx.GraphModule] = []

    def compiled(part: fx.GraphModule) -> Callable[[list[Any]], Any]:
        made.append(part)
        return _interpreted(part)

    def between(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(3):
            x = _summed(aten.mm.default(x, w))
        return (x,)

    module = split_at_collectives(_module(between, torch.ones(2, 3), torch.ones(3, 3)), compiled)
    assert len(made) == 1
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert len({node.target for node in calls if node.name.startswith("part")}) == 1
    text = "\n".join(f"{node.name}({', '.join(map(str, node.all_input_nodes))})" for node in calls)
    expecttest.assert_expected_inline(
        text,
        """\
part_2(x_1, w_1)
mm(part_2)
all_reduce(mm)
wait_tensor(all_reduce)
part_6(wait_tensor, w_1)
mm_1(part_6)
all_reduce_1(mm_1)
wait_tensor_1(all_reduce_1)
part_10(wait_tensor_1, w_1)
mm_2(part_10)
all_reduce_2(mm_2)
wait_tensor_2(all_reduce_2)""",
    )


@pytest.mark.parametrize("compiler", [Inductor(), _interpreted])
def test_results_are_those_of_the_whole(compiler: Any) -> None:
    inputs = torch.randn(4, 3), torch.randn(3, 3)
    arguments = list(inputs)
    (found,) = compile_in_parts(_module(layer, *inputs), compiler)(arguments)
    assert not arguments
    torch.testing.assert_close(found, layer(*inputs)[0])


def test_a_module_without_collectives_is_compiled_whole() -> None:
    made: list[fx.GraphModule] = []

    def compiler(module: fx.GraphModule, examples: Any) -> Any:
        made.append(module)
        return _interpreted(module)

    compile_in_parts(_module(lambda x: (x.sin().cos(),), torch.ones(2)), compiler)
    assert len(made) == 1


def test_parts_of_a_tuple_stay_with_it() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        variance, mean = aten.var_mean.correction(x, [0])
        return _summed(variance) + mean, _summed(mean)

    x = torch.randn(4, 3)
    module = _module(function, x)
    late = [node for node in module.graph.nodes if node.target is operator.getitem][1]
    user = next(iter(late.users))
    user.prepend(late)  # where its first reader is, after a collective
    (a, b), (c, d) = compile_in_parts(module, _interpreted)([x]), function(x)
    assert torch.equal(a, c)
    assert torch.equal(b, d)


def _dies(value: weakref.ref) -> bool:
    """Wait for a value to be gone: a thread of the collective may hold it a little longer."""
    for _ in range(100):
        if value() is None:
            return True
        time.sleep(0.01)
    return False


def test_values_die_inside_the_part_that_reads_them_last() -> None:
    seen: list[bool] = []
    watched: list[weakref.ref] = []

    class Watching(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            if node.target is aten.cos.default:
                seen.append(_dies(watched[0]))
            return super().run_node(node)

    def compiler(module: fx.GraphModule, _examples: Any) -> Any:
        def call(arguments: list[Any]) -> Any:
            if any(node.target is aten.cos.default for node in module.graph.nodes):
                watched.append(weakref.ref(arguments[0]))
            return Watching(module).boxed_run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    compile_in_parts(_module(lambda x: (_summed(x.sin()).exp().cos(),), torch.ones(2)), compiler)([torch.ones(2)])
    assert seen == [True]
