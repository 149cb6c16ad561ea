"""Workspaces of CUDA kernels from shapes and dtypes: numbers worked out by hand from PyTorch's source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from roundpipe_fx.analysis.cost import predict_workspaces, workspace
from roundpipe_fx.analysis.cost.workspace_formulas import LARGEST_GPU, Gpu, workspace_by_formula
from roundpipe_fx.ir.joint_graph import Mark

aten = torch.ops.aten
CUDA = torch.device("cuda")
H100 = Gpu(multiprocessors=132, threads=2048)
FLOAT, HALF, LONG = torch.float32, torch.bfloat16, torch.int64


def tensor(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def call(target: Any, *arguments: Any, results: Any = None, **keywords: Any) -> fx.Node:
    """A node that calls an operator; its results are those that its fake kernel gives, if none are given."""
    graph = fx.Graph()

    def operand(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = value
            return node
        return [operand(item) for item in value] if isinstance(value, list) else value

    node = graph.call_function(target, tuple(map(operand, arguments)), {k: operand(v) for k, v in keywords.items()})
    node.meta["val"] = target(*arguments, **keywords) if results is None else results
    return node


@pytest.fixture(autouse=True)
def fake() -> Any:
    with FakeTensorMode():
        yield


def attention(
    target: Any, *, heads: int = 3, of_keys: int = 3, rows: int = 300, width: int = 40, dtype: torch.dtype = HALF
) -> fx.Node:
    """A backward of attention, with operands as PyTorch's kernels lay them out: heads beside each other in a row."""
    query, gradient, out = (tensor(2, rows, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3))
    key, value = (tensor(2, rows, of_keys, width, dtype=dtype).transpose(1, 2) for _ in range(2))
    sums, seed = tensor(2, heads, rows), tensor(2, dtype=LONG)
    operands = (gradient, query, key, value)
    if target is aten._scaled_dot_product_flash_attention_backward.default:
        arguments = (*operands, out, sums, None, None, rows, rows, 0.0, True, seed, seed)
    elif target is aten._scaled_dot_product_efficient_attention_backward.default:
        arguments = (*operands, None, out, sums, seed, seed, 0.0, [True, True, True, False], True)
    else:
        arguments = (*operands, out, sums, 0.0, True)
    return call(target, *arguments, results=(query, key, value))


FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default
ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def test_flash_attention_accumulates_the_gradient_of_queries_in_float32() -> None:
    # 300 rows are rounded to 384, 40 numbers to 64: sums of 2 * 3 * 384, a gradient of 2 * 384 * 3 * 64 floats.
    alone = 4 * 2 * 3 * 384 + 4 * 2 * 384 * 3 * 64
    assert workspace_by_formula(attention(FLASH)) == alone == 599_040
    # One head of keys for three of queries: their gradients are computed for each head, then summed.
    grouped = 2 * 144_384  # 2 * 300 * 3 * 40 * 2 bytes each, rounded up to 512
    assert workspace_by_formula(attention(FLASH, of_keys=1)) == alone + grouped
    # In a fixed order: as many gradients as keep 132 multiprocessors busy with 6 heads each.
    exact = Gpu(132, 2048, deterministic=True)
    assert workspace_by_formula(attention(FLASH), exact) == 4 * 2 * 3 * 384 + 22 * 4 * 2 * 384 * 3 * 64
    # A gradient that is not laid out as the kernel reads it is copied.
    node = attention(FLASH)
    node.args[0].meta["val"] = tensor(2, 3, 300, 40, dtype=HALF)
    assert workspace_by_formula(node) == alone + 144_384
    assert workspace_by_formula(attention(FLASH, dtype=FLOAT)) is None  # there is no such kernel


def test_flash_attention_sums_parts_of_the_keys_where_there_are_few_queries() -> None:
    def forward(batch: int, rows: int, keys: int, dropout: float = 0.0) -> int | None:
        query, key = tensor(batch, 4, rows, 64, dtype=HALF), tensor(batch, 4, keys, 64, dtype=HALF)
        target = aten._scaled_dot_product_flash_attention.default
        return workspace_by_formula(call(target, query, key, key, dropout, results=(query,)), H100)

    assert forward(8, 1024, 1024) == 0  # 8 * 4 * 16 blocks are more than 0.8 * 2 * 132
    # 16 blocks; 1,024 keys have at most 4 parts of 256. Sums, and outputs, of 4 * 4 * 256 rows.
    assert forward(1, 256, 1024) == 4 * 4 * 4 * 256 * (1 + 64)
    assert forward(1, 256, 256) == 0 and forward(1, 256, 1024, dropout=0.1) == 512


def test_efficient_attention_shares_the_gradient_of_queries_among_blocks() -> None:
    # float32: sums of 300 rows of 6 heads, then 5 blocks of 64 rows by 64 of the 40 numbers, with 4 more numbers each.
    assert workspace_by_formula(attention(EFFICIENT, dtype=FLOAT)) == 7680 + 6 * 5 * (64 * 64 + 4) * 4 + 32
    # 256 numbers are 4 blocks of 64, of up to 128 rows.
    wide = attention(EFFICIENT, rows=32, width=256, dtype=FLOAT)
    assert workspace_by_formula(wide) == 1024 + 2 * 3 * 4 * (128 * 64 + 4) * 4 + 128
    assert workspace_by_formula(attention(EFFICIENT, of_keys=1)) is None
    # In half precision narrow heads take the same, as kernels keep gradients of keys and values in registers. Of wide
    # ones these are in memory too: with 6 heads, 300 rows in 5 parts of 64, of two times 256 numbers.
    assert workspace_by_formula(attention(EFFICIENT)) == 7680 + 6 * 5 * (64 * 64 + 4) * 4 + 32
    in_memory = 6 * (3 * 4 * (128 * 64 + 4) + 5 * 64 * 2 * 256) * 4
    assert workspace_by_formula(attention(EFFICIENT, width=256)) == 7680 + in_memory + 384


def test_what_was_traced_on_the_cpu_counts_as_the_kernel_that_a_gpu_has() -> None:
    assert workspace_by_formula(attention(ON_CPU)) == workspace_by_formula(attention(FLASH))
    plain = attention(ON_CPU, dtype=FLOAT)
    assert workspace_by_formula(plain) == workspace_by_formula(attention(EFFICIENT, dtype=FLOAT))
    wide = attention(ON_CPU, width=256)
    candidates = [workspace_by_formula(attention(target, width=256)) for target in (FLASH, EFFICIENT)]
    assert workspace_by_formula(wide) == max(candidates)
    assert workspace_by_formula(attention(ON_CPU, dtype=torch.float64)) is None


def test_norms_keep_partial_sums_of_many_short_rows() -> None:
    def backward(rows: int, columns: int, mask: tuple[bool, ...] = (True, True, True)) -> int | None:
        x, weight, mean = tensor(rows, columns), tensor(columns), tensor(rows, 1)
        target = aten.native_layer_norm_backward.default
        return workspace_by_formula(
            call(target, x, x, [columns], mean, mean, weight, weight, list(mask), results=(x,)), H100
        )

    assert backward(65_536, 256) == 0
    assert backward(131_072, 66 * 32) == 0  # as many blocks of columns as half the multiprocessors
    # 256 columns are 8 blocks; 131,072 rows are 4,096 parts of 32, which 32,768 // 8 blocks take.
    partial = 4 * 4096 * 256
    # They are summed by blocks of 32 by 4 threads, each thread for 4 outputs: 4,096 // 4 values, so by
    # min(ceil(132 * 16 / 2), 1024 // 16) = 64 blocks, with 128 numbers for each. And a counter for each of 2 blocks.
    summed = 4 * 256 * 64 * 128 + 512
    assert backward(131_072, 256) == 2 * (partial + 1024) + summed
    assert backward(131_072, 256, (True, True, False)) == partial + 1024 + summed
    assert backward(131_072, 256, (True, False, False)) == 0


def test_group_norm_sums_over_channels_and_groups() -> None:
    x, weight, statistic = tensor(4, 64, 10, dtype=HALF), tensor(64, dtype=HALF), tensor(4, 8, dtype=HALF)
    target = aten.native_group_norm_backward.default
    node = call(target, x, x, statistic, statistic, weight, 4, 64, 10, 8, [True, True, True], results=(x,))
    assert workspace_by_formula(node) == 3 * 4 * 64 * 4 + 2 * 512  # 4 * 8 floats take one block of 512 bytes


def test_softmaxes_need_nothing_but_the_product_that_the_gradient_is_made_of() -> None:
    x = tensor(8, 64)
    assert workspace_by_formula(call(aten._softmax.default, x, -1, False)) == 0
    assert workspace_by_formula(call(aten._log_softmax.default, x, -1, False)) == 0
    assert workspace_by_formula(call(aten._log_softmax_backward_data.default, x, x, -1, FLOAT)) == 0
    assert workspace_by_formula(call(aten._softmax_backward_data.default, x, x, -1, FLOAT)) == 2048
    assert workspace_by_formula(call(aten._softmax.default, x.t(), -1, False)) == 2048  # which is copied first


def test_long_rows_are_sorted_with_a_second_buffer_for_keys_and_indices() -> None:
    assert workspace_by_formula(call(aten.sort.default, tensor(16, 4096))) == 4096 * 8
    # One row: its indices, then 4 + 8 bytes for each element, 1 for counters of digits, and 64 KiB.
    row = 8192 * 8 + 8192 * 13 + 2**16
    assert workspace_by_formula(call(aten.sort.default, tensor(8192))) == row
    assert workspace_by_formula(call(aten.sort.stable, tensor(1, 8192), stable=True)) == row
    # Many rows: indices of all, and both buffers.
    assert workspace_by_formula(call(aten.sort.default, tensor(128, 8192))) == 2**20 * 8 + 2**20 * 12 + 512
    # A few rows: indices and rows twice, then all values, and their buffers.
    few = 2 * 2**16 * 8 + 2**16 * 4 + 2**16 * 13 + 2**16
    assert workspace_by_formula(call(aten.sort.default, tensor(8, 8192))) == few
    # Along columns: a copy, and values and indices in its order.
    assert workspace_by_formula(call(aten.sort.default, tensor(8192, 8), 0)) == few + 2**16 * (4 + 4 + 8)


def test_topk_counts_digits_in_each_part_of_a_row() -> None:
    node = call(aten.topk.default, tensor(100, 20_000), 8)
    # 100 rows have 20 parts of 1,024 elements: counts of 256 digits in two bytes, two totals of four bytes.
    parts = 512 * 2000 + 2 * 8192 + 4608
    assert workspace_by_formula(node) == parts + 512 + 512 + 1024 + 2048
    assert workspace_by_formula(call(aten.topk.default, tensor(100, 20_000), 5000)) is None


def test_the_gradient_of_an_embedding_sorts_its_indices() -> None:
    def backward(count: int, weights: int, width: int = 16) -> int | None:
        target = aten.embedding_dense_backward.default
        return workspace_by_formula(
            call(target, tensor(count, width, dtype=HALF), tensor(count, dtype=LONG), weights, -1, False)
        )

    assert backward(3072, 1000) == 0
    # 65,536 indices of 1,000 rows: 6,553 + 1,000 partial sums of 16 floats are less than what sorting takes: the sorted
    # indices, where they come from, and their first order; two more buffers, counters of digits, and 64 KiB.
    assert backward(65_536, 1000) == 3 * 65_536 * 8 + 65_536 * 17 + 2**16
    # Wider rows: sorted indices, their places, starts of rows; counts and starts of 1,000 rows' parts; 7,553 sums.
    index_bytes, of_rows, parts = 3 * 65_536 * 8, 2 * (8192 + 512), 7553
    assert backward(65_536, 1000, 1024) == index_bytes + of_rows + 60_928 + parts * 1024 * 4 + 4608


def test_repeated_indices_are_sorted_to_add_up() -> None:
    x, index = tensor(1000, 64), tensor(4096, dtype=LONG)
    node = call(aten.index_put.default, x, [index], tensor(4096, 64), True)
    sorting = 4 * 4096 * 8 + 4096 * 17 + 2**16
    assert workspace_by_formula(node) == sorting
    one = call(aten.index_put.default, x, [index], tensor(64), True)  # which is repeated for each index
    assert workspace_by_formula(one) == sorting + 4096 * 64 * 4
    assert workspace_by_formula(call(aten.index_put.default, x, [index], tensor(4096, 64))) is None
    mask = call(aten.index_put.default, x, [tensor(1000, dtype=torch.bool)], tensor(64), True, results=x)
    assert workspace_by_formula(mask) is None


def test_blocks_of_threads_that_share_an_output_have_a_buffer() -> None:
    # 4,096 columns: blocks of 32 by 4 threads with 4 outputs each, 32 in a row. 4,096 rows: 1,024 values each, so 64 of
    # the ceil(132 * 16 / 32) = 66 blocks that the device has for a column of blocks: 128 numbers for each output.
    assert workspace_by_formula(call(aten.sum.dim_IntList, tensor(4096, 4096), [0]), H100) == 4 * 4096 * 64 * 128 + 512
    # A quarter of the columns and four times the rows: 8 blocks in a row, so 256 of ceil(132 * 16 / 8) = 264 blocks.
    assert (
        workspace_by_formula(call(aten.sum.dim_IntList, tensor(16_384, 1024), [0]), H100) == 4 * 1024 * 256 * 128 + 512
    )
    # Columns that are no multiple of 2: threads have one output, blocks are 32 by 16; ceil(132 * 4 / 32) = 17 of them
    # share a column of blocks, though 65,536 rows would do for 256.
    odd = workspace_by_formula(call(aten.sum.dim_IntList, tensor(65_536, 1023), [0]), H100)
    assert odd == 4 * 1023 * 17 * 32 + 128 + 512
    # Few rows are not shared; nor are rows that are reduced, of which there are enough.
    assert workspace_by_formula(call(aten.sum.dim_IntList, tensor(512, 4096), [0]), H100) == 0
    assert workspace_by_formula(call(aten.amax.default, tensor(4096, 4096), [-1]), H100) == 0
    # A whole tensor: one output, of at most 4 blocks for each multiprocessor.
    assert workspace_by_formula(call(aten.mean.default, tensor(4096, 4096)), H100) == 2560 + 512  # 528 numbers
    assert workspace_by_formula(call(aten.var.correction, tensor(4096, 4096)), H100) == 528 * 16 + 256 + 512
    # Integers are converted first.
    assert workspace_by_formula(call(aten.sum.default, tensor(10, 10, dtype=torch.bool))) == 1024
    assert workspace_by_formula(call(aten.sum.dim_IntList, tensor(1).expand(4096, 4096), [0])) is None


def test_other_operators_are_unknown() -> None:
    x = tensor(4, 4)
    assert workspace_by_formula(call(aten.cumsum.default, x, 0)) is None
    assert workspace_by_formula(call(aten.sum.dim_IntList, tensor(0, 4), [1])) == 0


def test_a_gpu_that_is_not_there_has_formulas_and_a_cpu_has_none() -> None:
    node = call(aten._softmax_backward_data.default, tensor(8, 64), tensor(8, 64), -1, FLOAT)
    assert predict_workspaces([node], CUDA, present=False) == {node: 2048}
    assert predict_workspaces([node], torch.device("cpu"), present=False) == {}
    unknown = call(aten.cumsum.default, tensor(8, 64), 0)
    assert predict_workspaces([unknown], CUDA, present=False) == {} and Mark.UNTRIED not in unknown.meta


def test_a_formula_stands_in_for_a_trial_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    known = call(aten._softmax_backward_data.default, tensor(8, 64), tensor(8, 64), -1, FLOAT)
    unknown = call(aten.cumsum.default, tensor(8, 64), 0)
    monkeypatch.setattr(workspace, "_gpu", lambda *_: LARGEST_GPU)
    with monkeypatch.context() as patched:
        patched.setattr(workspace, "_measure", lambda *_: None)
        assert predict_workspaces([known, unknown], torch.device("cpu")) == {known: 2048}
        assert Mark.UNTRIED not in known.meta and unknown.meta[Mark.UNTRIED]
    monkeypatch.setattr(workspace, "_measure", lambda *_: 7)  # the measurement counts
    assert predict_workspaces([known], torch.device("cpu")) == {known: 7}
