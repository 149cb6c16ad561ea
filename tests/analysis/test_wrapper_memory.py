"""Allocations and frees of Inductor's code, read off its text."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from roundpipe_fx.analysis.liveness import Event, find_peak
from roundpipe_fx.analysis.program_events import FollowedModule
from roundpipe_fx.analysis.wrapper_memory import Layout, Workspaces, follow_wrapper

_BEFORE = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
assert_size_stride = torch._C._dynamo.guards.assert_size_stride
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()

cpp_fused_0 = async_compile.cpp_pybinding(['const float*', 'float*'], 'no code')

async_compile.wait(globals())
del async_compile

class Runner:
    def call(self, args):
"""
_AFTER = """
call = Runner().call

if __name__ == "__main__":
    raise AssertionError("a benchmark, which is not run")
"""


def _square(width: int) -> Layout:
    return Layout((width, width), (width, 1), torch.float32, torch.device("cpu"))


def _followed(body: str, *storages: int, workspaces: Workspaces | None = None, width: int = 8) -> FollowedModule:
    lines = "\n".join(f"        {line.strip()}" for line in body.strip().splitlines())
    inputs = [_square(width) for _ in storages]
    return follow_wrapper(f"{_BEFORE}{lines}\n{_AFTER}", inputs, workspaces or {}, [[storage] for storage in storages])


def _peak(followed: FollowedModule, incoming: int) -> int:
    events = [Event(None, reads, makes, workspace=size) for _, reads, makes, size in followed.operations]
    returned = [storage for leaves in followed.returns for storage in leaves]
    return find_peak(events, [0] * incoming + followed.sizes, lasting=returned).bytes


def test_storages_are_made_freed_and_written_over() -> None:
    followed = _followed(
        """
        arg0_1, arg1_1 = args
        args.clear()
        assert_size_stride(arg0_1, (8, 8), (8, 1))
        buf0 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        cpp_fused_0(arg0_1, buf0)
        del arg0_1
        buf1 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        extern_kernels.mm(buf0, reinterpret_tensor(arg1_1, (8, 8), (1, 8), 0), out=buf1)
        del arg1_1
        buf2 = buf0; del buf0  # reuse
        cpp_fused_0(buf1, buf2)
        del buf1
        buf3 = empty_strided_cpu((4, ), (1, ), torch.int64)
        return (buf2, buf3, )
        """,
        0,
        1,
    )
    assert followed.sizes == [256, 256, 32] and followed.returns == [[2], [4]]
    assert [operation.makes for operation in followed.operations] == [[], [2], [3], [4]]
    assert [sorted(operation.reads) for operation in followed.operations] == [[], [0], [1, 3], []]
    assert _peak(followed, 2) == 512


def test_a_donated_input_is_the_result() -> None:
    """Also where two inputs share a storage, and where others are not counted."""
    followed = _followed(
        """
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        buf0 = arg0_1; del arg0_1  # reuse
        cpp_fused_0(arg1_1, buf0)
        del arg1_1
        del arg2_1
        return (buf0, )
        """,
        0,
        -1,
        0,
    )
    assert not followed.sizes and followed.returns == [[0]]


def _is_transposed(call: fx.Node) -> bool:
    (operand,) = call.all_input_nodes
    return operand.meta["val"].stride() == (1, 8)


def test_operators_have_workspaces_and_several_results() -> None:
    """Workspaces are of the layout that the code passes, not of the input's own."""
    followed = _followed(
        """
        (arg0_1, ) = args
        args.clear()
        buf0 = torch.ops.aten.native_dropout.default(reinterpret_tensor(arg0_1, (8, 8), (1, 8), 0), 0.5, True)
        del arg0_1
        buf1 = buf0[0]
        buf2 = buf0[1]
        del buf0
        del buf2
        return (buf1, )
        """,
        0,
        workspaces={"aten::native_dropout": lambda call: 1000 if _is_transposed(call) else 0},
    )
    (_, operation) = followed.operations
    assert operation.workspace == 1000 and followed.sizes == [256, 64] and followed.returns == [[1]]
    assert sorted(operation.reads) == [0, 2] and _peak(followed, 1) == 1320


def test_code_that_reads_numbers_cannot_be_followed() -> None:
    with pytest.raises(Exception, match="_local_scalar_dense"):
        _followed("(arg0_1, ) = args\nbuf0 = empty_strided_cpu((int(arg0_1[0, 0].item()), ), (1, ), torch.float32)", 0)
