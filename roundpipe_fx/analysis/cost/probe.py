"""Trials: an operator is run once, alone, on made-up operands, to measure its workspace and its results' layouts.

Neither is known from a graph: fake kernels compute most strides correctly but not all, and no workspaces. What operands
hold depends on the operator::

    every operator                                   zeros: valid as indices, lengths and probabilities
    one whose workspace depends on values, such as   also ones, and distinct numbers; the largest workspace counts
    an index by a mask or isin

Which operators are run, and on which operands, is written in :mod:`roundpipe_fx.analysis.cost.operand_rules`. One that
needs more memory than the step may take, which is what the device has free, is not run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import fx

from roundpipe_fx.analysis.cost.operand_kinds import index_limits
from roundpipe_fx.analysis.cost.operand_rules import arguments_of_node, kinds_of_call
from roundpipe_fx.analysis.cost.signature import signature_of
from roundpipe_fx.analysis.cost.synthetic import has_memory_for, run_alone, synthetic_operands
from roundpipe_fx.analysis.data_files import cache_folder, is_on, read_data, versions, write_data
from roundpipe_fx.ir.joint_graph import has_tag, is_mask, tensor_values
from roundpipe_fx.torch_private import (
    ForkedLock,
    ProfiledMemory,
    profile_memory,
    save_rng_states,
    size_hint,
    tree_leaves,
)

log = logging.getLogger(__name__)

aten = torch.ops.aten

T = TypeVar("T")


class TensorLayout(NamedTuple):
    """Sizes and strides of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Probe(NamedTuple):
    """The result of running an operator alone.

    Attributes:
        workspace: bytes that its kernel allocates and frees before it returns.
        retained: bytes that it allocates and does not free, plus those of a copy of a sparse result, which autograd
            makes for the leaf.
        layouts: layouts of its results, flattened; ``None`` for results that are not strided tensors.
        storages: bytes of the storages of its results, flattened.
    """

    workspace: int
    retained: int
    layouts: tuple[TensorLayout | None, ...]
    storages: tuple[int, ...]


_FORMAT = "roundpipe_fx trials 2"
_probed: dict[Any, Probe | None] = {}
_files_read: set[Path] = set()
_not_written: set[str] = set()
"""Devices of trials that are not on disk."""
_probing = ForkedLock()
_MOST_KNOWN = 1 << 14


def probe_alone(node: fx.Node, device: torch.device, single: bool = False) -> Probe | None:
    """Run a node's operator alone, unless an equal call has been tried before.

    Must be called where no dispatch mode and no profiler is active (:func:`run_in_thread`).

    Args:
        node: an operation on fake tensors.
        device: the device to run it on.
        single: whether its operands have one element.

    Returns:
        ``None`` if the operator must not run on synthetic operands, does not accept these, or has no memory for them.
    """
    key = _key_of(node, device, single)
    # Held for the look at the table alone: a trial takes up to seconds, and two threads may make it twice.
    with _probing:
        _read_probes(device)
        if key in _probed:
            return _probed[key]
    # Not cached: with more memory free the next call tries it.
    if not single and not has_memory_for(node, device, _BYTES_OF_NUMBERS if _depends_on_numbers(node) else 0):
        log.info("%s is not probed: %s has no memory for its operands and results", node.target, device)
        return None
    try:
        probe = _probe_device(node, device, single)
    except torch.OutOfMemoryError as error:
        log.info("%s is not probed: %s", node.target, error)
        return None
    with _probing:
        # A table that is full starts again: trials are kept on disk.
        if len(_probed) >= _MOST_KNOWN:
            _probed.clear()
        _probed[key] = probe
        _not_written.add(str(device))
    return probe


def probe_in_thread(node: fx.Node, device: torch.device) -> Probe | None:
    """As :func:`probe_alone`, but callable from anywhere: an operator not yet tried runs in another thread."""
    key = _key_of(node, device, False)
    with _probing:
        _read_probes(device)
        if key in _probed:
            return _probed[key]
    return run_in_thread(lambda: probe_alone(node, device))


def _key_of(node: fx.Node, device: torch.device, single: bool) -> tuple[Any, ...]:
    return signature_of(node, single), str(device), single, kernel_settings()


def kernel_settings() -> tuple[Any, ...]:
    """Settings that the choice of kernels may depend on, and with it workspaces and layouts."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )


def device_text(device: torch.device) -> str:
    """Text of all that the kernels of a device depend on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} {properties.major}.{properties.minor} {properties.total_memory}"


def _header(device: torch.device) -> dict[str, str]:
    return {"format": _FORMAT, "device": device_text(device), **versions()}


def _path(device: torch.device) -> Path:
    name = "".join(letter if letter.isalnum() else "_" for letter in f"{device}_{device_text(device)}")
    return cache_folder() / f"trials_{name}.json"


def _read_probes(device: torch.device) -> None:
    """Take over what earlier processes have tried, once."""
    if not is_on() or (path := _path(device)) in _files_read:
        return
    _files_read.add(path)
    try:
        probes = {_key_from(key): _probe_from(probe) for key, probe in read_data(path, _header(device))}
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError) as error:
        log.info("the file of probes %s is ignored: %s", path, error)
        return
    for key, probe in probes.items():
        # What this process has tried goes before what the file says.
        _probed.setdefault(key, probe)


def write_probes(device: torch.device) -> None:
    """Store what has been tried on a device for later processes."""
    with _probing:
        if str(device) not in _not_written or not is_on():
            return
        _not_written.discard(str(device))
        finished = [
            (key, tuple(probe)) for key, probe in _probed.items() if probe is not None and key[1] == str(device)
        ]
    try:
        write_data(_path(device), _header(device), finished)
    except OSError as error:
        log.warning("probes are not stored: %s", error)


def _key_from(key: Any) -> tuple[Any, ...]:
    signature, device, single, settings = key
    return signature, device, single, tuple(settings)


def _probe_from(probe: Any) -> Probe:
    workspace, retained, layouts, storages = probe
    sizes = [workspace, retained, *storages]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} are not bytes")
    lies = [layout and TensorLayout(*map(tuple, layout)) for layout in layouts]
    return Probe(workspace, retained, tuple(lies), tuple(storages))


def run_in_thread(work: Callable[[], T]) -> T:
    """Run a function in another thread, where no dispatch mode and no profiler of the user is active."""
    # A new thread has no dispatch modes and no profiler of the caller's.
    with ThreadPoolExecutor(1, "roundpipe_fx trials") as thread:
        return thread.submit(work).result()


_BY_NUMBERS = (
    aten._embedding_bag,
    aten._embedding_bag_backward,
    aten._embedding_bag_dense_backward,
    aten._embedding_bag_forward_only,
    aten._embedding_bag_per_sample_weights_backward,
    aten.isin,
    aten.linalg_matrix_exp,
    aten.repeat_interleave,
)
"""Operators whose workspace depends on values, though their results' sizes do not; found by trying all on the CPU."""
_BYTES_OF_NUMBERS = 24
"""For each element: integers and two floating-point numbers that distinct numbers are made of."""


def _depends_on_numbers(node: fx.Node) -> bool:
    target: Any = node.target
    if target is aten.index.Tensor:
        return any(map(is_mask, node.all_input_nodes))
    return target.overloadpacket in _BY_NUMBERS or has_tag(target, torch.Tag.dynamic_output_shape)


def _probe_device(node: fx.Node, device: torch.device, single: bool) -> Probe | None:
    # Zeros first: they are valid as indices, lengths and probabilities for nearly every operator.
    probes = [_probe_numbers(node, device, torch.Tensor.zero_, single)]
    if _depends_on_numbers(node):
        arguments = arguments_of_node(node)
        limits = index_limits(kinds_of_call(node.target, arguments) or {}, arguments)
        # The least size bounds what an index may be in any operand, where the rules say nothing more exact.
        sizes = [size for source in node.all_input_nodes for value in tensor_values(source) for size in value.shape]
        bound = min(limits or (count for size in sizes if (count := size_hint(size))), default=1)
        probes += [
            _probe_numbers(node, device, fill, single)
            for fill in (_make_filler_of_ones(bound if limits else 2), _make_filler_of_distinct(bound))
        ]
    finished = [probe for probe in probes if probe is not None]
    if not finished:
        return None
    # Values decide how much is needed, so the largest of the tries counts.
    workspace = max(probe.workspace for probe in finished)
    return Probe(workspace, max(probe.retained for probe in finished), finished[0].layouts, finished[0].storages)


def _make_filler_of_ones(limit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Ones; integers are below ``limit``."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        exact = not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool
        return tensor.fill_(min(1, limit - 1) if exact else 1)

    return fill


def _make_filler_of_distinct(limit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Distinct numbers: small integers below ``limit``, and large numbers of both signs."""

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        count = torch.arange(tensor.numel(), device=tensor.device).reshape(tensor.shape)
        if tensor.dtype is torch.bool:
            return tensor.copy_(count % 2)
        exact = not tensor.is_floating_point() and not tensor.is_complex()
        return tensor.copy_(count.clamp(max=limit - 1) if exact else 1000 * (count + 1.0).cos())

    return fill


def _probe_numbers(
    node: fx.Node, device: torch.device, fill: Callable[[torch.Tensor], torch.Tensor], single: bool
) -> Probe | None:
    # A trial may draw random numbers, which the user's program must not miss.
    restore = save_rng_states([device] if device.type == "cuda" else [])
    profiles: list[ProfiledMemory] = []
    try:
        with torch.no_grad():
            args, kwargs = synthetic_operands(node, device, fill, single)
            if device.type != "cpu":  # the first run loads handles and kernels
                run_alone(node.target, args, kwargs)
            result = profile_memory(lambda: run_alone(node.target, args, kwargs), device.type, profiles.append)
            _synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError) as error:
        # Not every operator accepts made-up operands.
        log.info("%s cannot be probed alone: %s", node.target, error)
        return None
    finally:
        restore()
    results = tree_leaves(result)
    return Probe(
        profiles[0].peak - profiles[0].retained,
        profiles[0].retained + sum(map(_sparse_bytes, results)),
        tuple(map(_layout, results)),
        tuple(0 if _layout(result) is None else result.untyped_storage().nbytes() for result in results),
    )


def _synchronize(device: torch.device) -> None:
    """Wait for a device, so that an error of its kernels is raised here."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _layout(value: Any) -> TensorLayout | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return TensorLayout(tuple(value.shape), tuple(value.stride()))


def _sparse_bytes(value: Any) -> int:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.sparse_coo:
        return 0
    return value._values().nbytes + value._indices().nbytes
