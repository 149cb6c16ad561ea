"""Workspace formulas: bytes that a CUDA kernel allocates beside its results, from its operands' shapes and dtypes.

They stand in for a trial (:mod:`roundpipe_fx.analysis.cost.probe`) where none is possible: the device is not there, or
has no memory for the operands. Each is read off PyTorch's source, which is named beside it (paths are below
``aten/src/ATen/native``, as of 2.13), for devices of compute capability 8.0 and later. Where the number
depends on what is not known before the kernel runs, it is an upper bound, and the docstring says so. An operator that
is not in the table has an unknown workspace; one whose formula is 0 has none.

Left out, because no bound is known: attention and batch norm of cuDNN, convolutions, ``index_add``, vector norms,
``logsumexp``, and whatever sorts more than 2**31 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.operand_rules import arguments_of_node
from roundpipe_fx.ir.joint_graph import tensor_values
from roundpipe_fx.torch_private import size_hint

aten = torch.ops.aten


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that kernels adapt to.

    Attributes:
        multiprocessors: how many the device has.
        threads: that each of them runs at once.
        deterministic: whether kernels must not depend on the order in which threads run.
    """

    multiprocessors: int
    threads: int
    deterministic: bool = False


LARGEST_GPU = Gpu(multiprocessors=142, threads=2048)
"""No device in :data:`roundpipe_fx.analysis.cost.roofline.DEVICES` has more: L40S has 142, A100 and H100 have 2,048."""


@dataclass(frozen=True)
class _Operand:
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def bytes(self) -> int:
        return _block(self.count * self.itemsize)

    @property
    def is_half(self) -> bool:
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def accumulator(self) -> int:
        """Bytes of the numbers in which sums of this dtype are accumulated."""
        return max(4, self.itemsize)

    def transposed(self, first: int, second: int) -> _Operand:
        order = list(range(len(self.sizes)))
        order[first], order[second] = order[second], order[first]
        return _Operand(tuple(self.sizes[at] for at in order), tuple(self.strides[at] for at in order), self.dtype)

    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def is_dense(self) -> bool:
        """Return whether it fills its memory, in any order of its dimensions."""
        lies = sorted((stride, size) for size, stride in zip(self.sizes, self.strides, strict=True) if size != 1)
        expected = 1
        for stride, size in lies:
            if stride != expected:
                return False
            expected *= size
        return True

    def copied(self) -> int:
        """Bytes of the copy that ``contiguous()`` makes."""
        return 0 if self.is_contiguous() else self.bytes


@dataclass(frozen=True)
class _KernelCall:
    """Arguments by name, with :class:`_Operand` for tensors, and the results."""

    arguments: Mapping[str, Any]
    results: tuple[_Operand, ...]
    gpu: Gpu

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        value = self.arguments.get(name)
        return default if value is None else value


_Formula = Callable[[_KernelCall], int | None]


def workspace_by_formula(node: fx.Node, gpu: Gpu = LARGEST_GPU) -> int | None:
    """Bytes that the CUDA kernel of a node's operator allocates and frees before it returns.

    Args:
        node: an operation on fake tensors, on whatever device they lie.
        gpu: the device that the kernel runs on, or one at least as large.

    Returns:
        exact or an upper bound; ``None``: unknown.
    """
    formula = _FORMULAS.get(getattr(node.target, "overloadpacket", None))
    values = [*tensor_values(node), *(value for source in node.all_input_nodes for value in tensor_values(source))]
    if formula is None or any(value.layout is not torch.strided for value in values):
        return None
    arguments = {name: _plain(value) for name, value in arguments_of_node(node).items()}
    call = _KernelCall(arguments, tuple(map(_operand, tensor_values(node))), gpu)
    return 0 if any(not result.count for result in call.results[:1]) else formula(call)


def _operand(value: torch.Tensor) -> _Operand:
    return _Operand(tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride())), value.dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _operand(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return size_hint(value) if isinstance(value, torch.SymInt) else value


def _block(size: int) -> int:
    """Bytes of an allocation: CUDA's caching allocator rounds up to 512."""
    return _rounded(size, 512)


def _rounded(size: int, multiple: int) -> int:
    return _parts(size, multiple) * multiple


def _parts(size: int, part: int) -> int:
    return -(-size // part)


# Attention

_FLASH_DTYPES = (torch.float16, torch.bfloat16)
_MOST_SPLITS = 128
_EFFICIENT_BLOCKS = (
    (64, 64, 32),
    (64, 64, 64),
    (128, 64, 96),
    (128, 128, 128),
    (128, 64, 128),
    (64, 64, 128),
    (128, 64, 65536),
    (64, 64, 65536),
)
"""Rows of queries, rows of keys of a block, and the largest head dimension that a kernel takes."""
_NARROW = 64
"""Up to so wide a head, gradients of keys and values fit into registers (``generate_kernels.py``, on K=80)."""
_MOST_BATCHES = 2**16 - 1
_SPLITS_OF_KEYS = 200


def _flash_attention(call: _KernelCall) -> int | None:
    """Sums of parts of the keys, where few queries would leave multiprocessors idle.

    An upper bound: into how many parts keys are split depends on the device.
    """
    # transformers/cuda/flash_attn/flash_api.cpp: mha_fwd, set_params_splitkv, num_splits_heuristic
    query, key = call["query"], call["key"]
    batch, heads, rows, width = query.sizes
    if query.dtype not in _FLASH_DTYPES or width > 256 or width % 8 or (rows == 1 and heads != key.sizes[1]):
        return None
    if call.get("dropout_p", 0.0):
        return _block(16)  # the state of the generator is allocated twice
    blocks = _parts(key.sizes[2], 256 if width <= 64 else 128 if width <= 128 else 64)
    slots = 2 * call.gpu.multiprocessors
    if batch * heads * _parts(rows, 64) >= 0.8 * slots or blocks == 1:
        return 0
    sums = min(_MOST_SPLITS, slots, blocks) * batch * heads * rows
    return _block(4 * sums) + _block(4 * sums * _flash_width(width))


def _flash_attention_backward(call: _KernelCall) -> int | None:
    """The gradient of queries in float32, sums of softmaxes, gradients of keys and values for each head of queries."""
    # transformers/cuda/attention_backward.cu: _flash_attention_backward; flash_attn/flash_api.cpp: mha_bwd
    query, key = call["query"], call["key"]
    batch, heads, rows, width = query.sizes
    if query.dtype not in _FLASH_DTYPES or width > 256 or width % 8 or call.get("cum_seq_q") is not None:
        return None
    padded = _rounded(rows, 128)
    parts = _parts(call.gpu.multiprocessors, batch * heads) if call.gpu.deterministic else 1
    needed = _block(4 * batch * heads * padded)
    needed += _block(4 * parts * batch * padded * heads * _flash_width(width))
    if heads != key.sizes[1]:
        needed += 2 * _block(batch * key.sizes[2] * heads * width * query.itemsize)
    return needed + sum(call[name].transposed(1, 2).copied() for name in ("grad_out", "out"))


def _flash_width(width: int) -> int:
    return _rounded(width, 32 if width <= 128 else 64)


def _efficient_attention(call: _KernelCall) -> int | None:
    """The output in float32, where the output has fewer bits.

    An upper bound: kernels for heads of at most 128 numbers keep it in registers, if the device has memory for these.
    """
    # transformers/cuda/attention.cu: _efficient_attention_forward; mem_eff_attention/kernel_forward.h
    query, value = call["query"], call["value"]
    if not _has_efficient_kernel(query, call["key"], value):
        return None
    batch, heads, rows, _ = query.sizes
    return _block(4 * batch * heads * rows * value.sizes[3]) if query.is_half else 0


def _efficient_attention_backward(call: _KernelCall) -> int | None:
    """Gradients that several blocks of threads add to, and products of gradients and outputs.

    An upper bound: the kernel, and with it the size of blocks, is chosen by the device's shared memory.
    """
    # transformers/cuda/attention_backward.cu: _efficient_attention_backward
    # transformers/cuda/mem_eff_attention/kernel_backward.h: workspace_size; kernels/cutlassB.h: dispatch_cutlassB
    gradient = call.get("grad_out_", call.get("grad_out"))
    query, key, value = call["query"], call["key"], call["value"]
    if not _has_efficient_kernel(query, key, value):
        return None
    batch, heads, rows, width = query.sizes
    _, _, columns, value_width = value.sizes
    widest = max(width, value_width)
    shared = 0
    for first, second, most in _EFFICIENT_BLOCKS:
        if widest > most or (second > 64 and not query.is_half) or widest <= _NARROW < most:
            continue
        numbers = _parts(rows, first) * _parts(width, second) * (first * second + 4)
        if query.is_half and most > first:  # gradients of keys and values do not fit into registers
            splits = max(1, min(_parts(columns, second), _SPLITS_OF_KEYS // (batch * heads)))
            numbers += splits * second * (_rounded(width, first) + _rounded(value_width, first))
        shared = max(shared, batch * heads * _rounded(numbers, 4) * 4)
    sums = _block(4 * batch * heads * rows)
    products = 0 if query.is_half else 2 * sums + _block(4 * batch * heads * rows * value_width)
    return gradient.transposed(1, 2).copied() + max(products, sums + _block(shared))


def _has_efficient_kernel(query: _Operand, key: _Operand, value: _Operand) -> bool:
    """Return whether memory-efficient attention takes these, in one call of its kernel."""
    aligned = all(operand.sizes[3] % (16 // operand.itemsize) == 0 for operand in (query, value))
    known = query.dtype in (*_FLASH_DTYPES, torch.float32)
    return known and aligned and query.sizes[1] == key.sizes[1] and query.sizes[0] <= _MOST_BATCHES


def _traced_on_cpu(call: _KernelCall, flash: _Formula, efficient: _Formula) -> int | None:
    """Of the kernel that takes the place of the CPU's on a GPU: flash attention where it can, else the efficient one.

    cuDNN's kernel, which PyTorch prefers on some devices, is not known.
    """
    # transformers/cuda/sdp_utils.cpp: priority_order, can_use_flash_attention
    query, key = call["query"], call["key"]
    square = not call.get("is_causal", False) or query.sizes[2] == key.sizes[2]
    if query.dtype not in _FLASH_DTYPES or call.get("attn_mask") is not None or not square:
        return efficient(call)
    if query.sizes[3] <= 192:
        return flash(call)
    known = flash(call), efficient(call)  # not every device has flash attention for wide heads
    return None if None in known else max(size for size in known if size is not None)


def _attention(call: _KernelCall) -> int | None:
    return _traced_on_cpu(call, _flash_attention, _efficient_attention)


def _attention_backward(call: _KernelCall) -> int | None:
    return _traced_on_cpu(call, _flash_attention_backward, _efficient_attention_backward)


# Norms and softmaxes

_MANY_ROWS = 64 * 1024
_MOST_BLOCKS = 32 * 1024


def _norm(call: _KernelCall) -> int:
    """Nothing but a copy of an input that is not contiguous."""
    # cuda/layer_norm_kernel.cu: layer_norm_cuda
    return int(call["input"].copied())


def _norm_backward(call: _KernelCall) -> int:
    """Partial sums of the gradients of weights, where there are many short rows.

    An upper bound: whether there are partial sums depends on the number of multiprocessors.
    """
    # cuda/layer_norm_kernel.cu: layer_norm_backward_cuda, LaunchGammaBetaBackwardCUDAKernel
    operand, weight = call["input"], call.get("weight")
    columns = math.prod(call["normalized_shape"])
    rows = operand.count // columns
    needed = int(call["grad_out"].copied() + operand.copied() + (0 if weight is None else weight.copied()))
    gradients = sum(map(bool, call["output_mask"][1:]))
    if rows <= _MANY_ROWS or columns // 32 >= call.gpu.multiprocessors // 2 or not gradients:
        return needed
    blocks = min(_MOST_BLOCKS // _parts(columns, 32), _parts(rows, 32))
    partial = _Operand((blocks, columns), (columns, 1), operand.dtype)
    summed = _reduction_buffer_bytes(partial, {0}, partial.accumulator, call.gpu)
    assert summed is not None  # at most 2**20 elements
    return needed + gradients * (partial.bytes + _block(columns * operand.itemsize)) + summed


def _group_norm_backward(call: _KernelCall) -> int:
    """Sums over each channel and each group."""
    # cuda/group_norm_kernel.cu: GroupNormBackwardKernelImplInternal, GroupNorm1dBackward
    operand, samples, channels = call["input"], call["N"], call["C"]
    size = operand.accumulator
    group_sums = 2 * _block(samples * call["group"] * size) if call["output_mask"][0] else 0
    needed = int(call["grad_out"].copied() + operand.copied()) + group_sums
    if call["HxW"] == 1:
        return needed
    scaled = call["output_mask"][0] and call.get("weight") is not None
    return needed + (2 + int(scaled)) * _block(samples * channels * size)


def _softmax(call: _KernelCall) -> int:
    """Nothing but a copy of an input that is not contiguous."""
    # cuda/SoftMax.cu: host_softmax
    return int(call["self"].copied())


def _log_softmax_backward(call: _KernelCall) -> int:
    """Nothing but copies of operands that are not contiguous."""
    # cuda/SoftMax.cu: host_softmax_backward
    return int(call["grad_output"].copied() + call["output"].copied())


def _softmax_backward(call: _KernelCall) -> int:
    """The product of gradient and output, and copies of what is not contiguous.

    An upper bound: the product may be contiguous though an operand is not.
    """
    # cuda/SoftMax.cu: softmax_backward_cuda_out
    gradient, output = call["grad_output"], call["output"]
    copies = gradient.bytes if not (gradient.is_contiguous() and output.is_contiguous()) else 0
    return int(gradient.bytes + copies + output.copied())


# Sorts

_SHORT = 4096
_LONG = 1_000_000
_FEW_SEGMENTS = 128
_MOST_SORTED = 2**31 - 1
_MOST_RESIDENT = 16
_SUBSCRIPTION = 5
_DIGITS = 128


def _radix_sort(count: int, key: int, value: int, gpu: Gpu) -> int:
    """Bytes that cub takes to sort keys with values: a second buffer for each, and counters of digits.

    An upper bound: a block of threads counts 256 digits in four bytes each, for at least 1,024 elements.
    """
    # cuda/cub-RadixSortPairs.cu; cub/device/dispatch/dispatch_radix_sort.cuh: InvokeOnesweep, InvokePasses
    counters = count + 2**16
    if key < 4:  # digits are counted before they are sorted, by as many blocks as the device holds
        counters += gpu.multiprocessors * _MOST_RESIDENT * _SUBSCRIPTION * _DIGITS * 4
    return _block(count * (key + value) + counters)


def _scan(count: int) -> int:
    """Bytes that cub takes for a prefix sum or a selection: at most 16 for each 128 elements, an upper bound."""
    return _block(count // 8 + 2**12)


def _sort(call: _KernelCall) -> int | None:
    """Indices in their first order, buffers of cub, and copies where the sorted dimension is not the innermost one."""
    # cuda/Sort.cpp: sort_cuda_kernel; cuda/SortStable.cu: do_launch_stable_sort_kernel
    operand = call["self"]
    if not operand.sizes:
        return 0
    dimension = call.get("dim", -1) % len(operand.sizes)
    length = operand.sizes[dimension]
    if length <= _SHORT:
        return _block(8 * length)
    if operand.count > _MOST_SORTED:
        return None
    size, segments = operand.itemsize, operand.count // length
    in_place = operand.is_dense() and operand.strides[dimension] == 1
    copies = 0 if in_place else 2 * operand.bytes + _block(8 * operand.count)
    if segments == 1 or length >= _LONG:
        return copies + _block(8 * length) + _radix_sort(length, size, 8, call.gpu)
    if segments < _FEW_SEGMENTS:  # all by value, then all by segment
        by_value = _block(operand.count * size) + _radix_sort(operand.count, size, 8, call.gpu)
        return copies + 2 * _block(8 * operand.count) + max(by_value, _radix_sort(operand.count, 8, 0, call.gpu))
    return copies + _block(8 * operand.count) + _block(operand.count * (size + 8) + 512)


def _topk(call: _KernelCall) -> int | None:
    """Counters of digits for each part of a slice; a copy of an input that is not contiguous.

    An upper bound: into how many parts a slice is divided depends on the device, and short slices are not.
    """
    # cuda/TensorTopK.cu: mbtopk::launch, launch_gather_topk_kernel; cuda/TensorTopK.cpp: topk_out_cuda
    operand = call["self"]
    if call["k"] > _SHORT:
        return None
    if not operand.sizes or not operand.count:
        return 0
    length = operand.sizes[call.get("dim", -1) % len(operand.sizes)]
    slices = operand.count // length
    blocks = slices * _parts(length, 1024)
    needed = _block(slices * operand.itemsize) + _block(4 * slices) + _block(8 * slices) + _block(16 * slices)
    needed += _block(512 * blocks) + 2 * _block(4 * blocks) + _scan(blocks)
    return int(operand.copied()) + needed


_FEW_INDICES = 3072
_ROWS_OF_A_PART = 10


def _embedding_backward(call: _KernelCall) -> int | None:
    """Sorted indices and where they come from, and partial sums of at most ten rows each.

    An upper bound, by what cub takes.
    """
    # cuda/Embedding.cu: embedding_dense_backward_cuda
    # cuda/EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel
    gradient, indices, scaled = call["grad_output"], call["indices"], call["scale_grad_by_freq"]
    count, size = indices.count, indices.itemsize
    copies = int(gradient.copied() + indices.copied())
    if count <= _FEW_INDICES and not scaled:
        return copies
    if count > _MOST_SORTED:
        return None
    index_bytes = _block(count * size)
    sorting = 3 * index_bytes + _radix_sort(count, size, size, call.gpu)
    kept = (3 if scaled else 2) * index_bytes
    segments = min(count, call["num_weights"])
    parts = count // _ROWS_OF_A_PART + segments
    selecting = kept + 2 * index_bytes + _block(8) + _scan(count)
    sums = _block(parts * gradient.sizes[-1] * gradient.accumulator)
    summing = kept + index_bytes + 2 * (_block(segments * size) + _block(8)) + _block(parts * size) + sums
    return copies + max(sorting, selecting, summing + _scan(segments))


def _index_put(call: _KernelCall) -> int | None:
    """Where repeated indices add up, they are sorted: linear and sorted indices, and copies of what is not contiguous.

    An upper bound, by what cub takes.
    """
    # cuda/Indexing.cu: index_put_with_sort_kernel, computeLinearIndex
    target, values = call["self"], call["values"]
    indices = [index for index in call["indices"] if index is not None]
    if not (call.get("accumulate", False) or call.gpu.deterministic):
        return None
    if not indices or any(index.dtype not in (torch.int32, torch.int64) for index in indices):
        return None
    count = math.prod(torch.broadcast_shapes(*(index.sizes for index in indices)))
    if not 0 < count <= _MOST_SORTED:
        return None
    positions = [position for position, index in enumerate(call["indices"]) if index is not None]
    indexed = math.prod(target.sizes[position] for position in positions)
    added = count * (target.count // indexed if indexed else 0)
    converted = sum(_block(8 * index.count) for index in indices if index.dtype is torch.int32)
    copies = target.copied() if positions == list(range(positions[0], positions[-1] + 1)) else 2 * target.bytes
    if values.count != added or not values.is_contiguous():
        copies += _block(added * values.itemsize)
    ranges = _block(8 * count)
    return int(converted + copies + max(3 * ranges, 4 * ranges + _radix_sort(count, 8, 8, call.gpu)))


# Reductions

_MOST_VALUES = 256
_FEWEST_VALUES = 16
_BITS_32 = 2**31 - 1


def _reduction(call: _KernelCall) -> int | None:
    """Partial results of blocks of threads that share an output; a copy of an input of another dtype."""
    # cuda/Reduce.cuh: setReduceConfig, ReduceConfig::global_memory_size, gpu_reduce_kernel
    # ReduceOpsUtils.h: make_reduction_from_out_ty
    operand, result = call["self"], call.results[0]
    size = max(operand.accumulator, result.accumulator)
    if result.dtype is operand.dtype or (operand.is_half and result.dtype is torch.float32):
        return _reduction_buffer_bytes(operand, _dimensions(call, operand), size, call.gpu)
    needed = _reduction_buffer_bytes(operand, _dimensions(call, operand), size, call.gpu)
    return None if needed is None else needed + _block(operand.count * result.itemsize)


def _reduction_with_index(call: _KernelCall) -> int | None:
    """Partial results, each with its index."""
    operand = call["self"]
    if "other" in call.arguments or (call.get("dim") is None and not operand.is_contiguous()):
        return None
    indexed = len(call.results) > 1 or call.results[0].dtype is torch.int64
    return _reduction_buffer_bytes(
        operand, _dimensions(call, operand), 16 if indexed else operand.accumulator, call.gpu
    )


def _variance(call: _KernelCall) -> int | None:
    """Partial means, sums of squares and two counts."""
    operand = call["self"]
    if operand.dtype.is_complex:
        return None
    return _reduction_buffer_bytes(operand, _dimensions(call, operand), 4 * operand.accumulator, call.gpu)


def _dimensions(call: _KernelCall, operand: _Operand) -> set[int]:
    """The dimensions over which a call reduces."""
    argument = call.get("dim", [])
    listed: Sequence[int] = argument if isinstance(argument, list) else [argument]
    rank = len(operand.sizes)
    return {dimension % rank for dimension in listed} or set(range(rank)) if rank else set()


def _reduction_buffer_bytes(operand: _Operand, dimensions: set[int], size: int, gpu: Gpu) -> int | None:
    """Bytes of the buffer in which blocks of threads share partial results, and of the counters of blocks.

    An upper bound: the vectors that threads load depend on how operands are aligned.

    Args:
        operand: the operand.
        dimensions: over which it is reduced.
        size: bytes of a partial result.
        gpu: the device.
    """
    lies = [(extent, operand.strides[at], at in dimensions) for at, extent in enumerate(operand.sizes) if extent != 1]
    if any(not stride for _, stride, _ in lies):
        return None
    reduced = _merge_contiguous(sorted([lie[:2] for lie in lies if lie[2]], key=lambda dimension: dimension[1]))
    kept = _merge_contiguous([lie[:2] for lie in reversed(lies) if not lie[2]])
    inputs = math.prod(extent for extent, _ in reduced)
    outputs = math.prod(extent for extent, _ in kept)
    if inputs < _MOST_VALUES:
        return 0
    along_rows = not kept or reduced[0][1] < kept[0][1]
    extent = 1 + sum((length - 1) * stride for length, stride in (*reduced, *kept))
    if extent * operand.itemsize > _BITS_32:
        # Reduced part by part, with partial results of all outputs; how it is divided is not known.
        if not along_rows:
            return None
        partial_results = outputs * (1 + _parts(inputs, _MOST_VALUES * 256)) + gpu.multiprocessors * _parts(
            gpu.threads, 256
        )
        return _block(size * partial_results) + _block(size * outputs) + _block(4 * outputs)
    if along_rows:
        vectors = [(vector, 1) for vector in (1, 2, 4, 8, 16)]
    else:
        widest = 4 if kept[0][1] == 1 else 1
        strides = [stride for _, stride in (*reduced, *kept[1:])]
        while kept[0][0] % widest or any(stride % widest for stride in strides):
            widest //= 2
        vectors = [(1, vector) for vector in (1, 2, 4) if vector <= widest]
    threads = 256 if operand.dtype is torch.complex128 else 512
    shapes = [(inputs // loaded, outputs) if along_rows else (outputs // stored, inputs) for loaded, stored in vectors]
    return max(
        _shared_buffer(inputs, outputs, _blocks_of_threads(*shape, threads // stored), stored, along_rows, size, gpu)
        for shape, (_, stored) in zip(shapes, vectors, strict=True)
    )


def _merge_contiguous(dimensions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Dimensions, innermost first, with those joined that lie in memory as one."""
    joined: list[tuple[int, int]] = []
    for extent, stride in dimensions:
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = (joined[-1][0] * extent, joined[-1][1])
        else:
            joined.append((extent, stride))
    return joined


def _blocks_of_threads(first: int, second: int, threads: int) -> tuple[int, int]:
    """Width and height of a block of threads."""
    first, second = (min(threads, 1 << max(size, 1).bit_length() - 1) for size in (first, second))
    height = min(second, threads // min(first, 32))
    return min(first, threads // height), height


def _shared_buffer(
    inputs: int, outputs: int, block: tuple[int, int], stored: int, along_rows: bool, size: int, gpu: Gpu
) -> int:
    """Bytes of the buffer and the counters; 0 where each output is of one block of threads."""
    width, height = block
    step = width * height if along_rows else height
    values = _parts(inputs, step)
    if _parts(inputs, step // height) < min(16 * height, _MOST_VALUES) or values < _MOST_VALUES:
        return 0
    grid = _parts(outputs // stored, 1 if along_rows else width)
    target = gpu.multiprocessors * (gpu.threads // (width * height))
    if grid > target:
        return 0
    sharing = max(min(_parts(target, grid), _parts(values, _FEWEST_VALUES)), _parts(values, _MOST_VALUES))
    if sharing == 1:
        return 0
    return _block(size * outputs * sharing * (1 if along_rows else width * stored)) + _block(4 * grid)


_FORMULAS: Mapping[Any, _Formula] = {
    aten._scaled_dot_product_flash_attention: _flash_attention,
    aten._scaled_dot_product_flash_attention_backward: _flash_attention_backward,
    aten._scaled_dot_product_efficient_attention: _efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten.native_layer_norm: _norm,
    aten.native_layer_norm_backward: _norm_backward,
    aten._fused_rms_norm: _norm,
    aten._fused_rms_norm_backward: _norm_backward,
    aten.native_group_norm_backward: _group_norm_backward,
    aten._softmax: _softmax,
    aten._log_softmax: _softmax,
    aten._softmax_backward_data: _softmax_backward,
    aten._log_softmax_backward_data: _log_softmax_backward,
    aten.sort: _sort,
    aten.topk: _topk,
    aten.embedding_dense_backward: _embedding_backward,
    aten.index_put: _index_put,
    aten._unsafe_index_put: _index_put,
    aten.sum: _reduction,
    aten.nansum: _reduction,
    aten.mean: _reduction,
    aten.prod: _reduction,
    aten.amax: _reduction,
    aten.amin: _reduction,
    aten.argmax: _reduction_with_index,
    aten.argmin: _reduction_with_index,
    aten.max: _reduction_with_index,
    aten.min: _reduction_with_index,
    aten.var: _variance,
    aten.var_mean: _variance,
    aten.std: _variance,
    aten.std_mean: _variance,
}
"""By operator; one that is absent has an unknown workspace."""
