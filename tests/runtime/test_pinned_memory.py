"""Memory that is registered with CUDA. Here CUDA is a table of what is registered; tests/gpu has steps."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections import deque

import pytest
import torch
from torch import nn

from roundpipe_fx.budget import HostMemoryError
from roundpipe_fx.runtime import pinned_memory
from roundpipe_fx.runtime.host_buffers import HostBuffers, allocating_on_host
from roundpipe_fx.runtime.pinned_memory import (
    PinnedGradients,
    pinned_bytes,
    pinned_copy,
    pinned_empty,
    release_idle_pages,
)
from tests.forked import in_forked_child

CUDA = torch.device("cuda", 0)


class Cudart:
    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.fails_with = 0
        self.calls = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        if not self.fails_with:
            self.registered[address] = size
        return self.fails_with

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory", 700: "an illegal memory access was encountered"}[code]


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    return made


@pytest.mark.parametrize("size", [1, 4095, 4097, 5 * 2**20 + 1])
def test_it_is_rounded_up_to_pages_and_unregistered_with_its_last_tensor(cudart: Cudart, size: int) -> None:
    memory = pinned_empty(size, CUDA)
    address = memory.data_ptr()
    assert memory.nbytes == memory.untyped_storage().nbytes() == size and address % mmap.PAGESIZE == 0
    assert cudart.registered == {address: pinned_bytes(size, "cuda")}
    assert size <= cudart.registered[address] < size + mmap.PAGESIZE
    part = nn.Parameter(memory[-1:], requires_grad=False)
    part.data = memory[:1]
    del memory
    assert cudart.registered
    del part
    assert not cudart.registered


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.complex64])
def test_a_copy_is_as_the_tensor_is(cudart: Cudart, dtype: torch.dtype) -> None:
    value = torch.randn(3, 4, 5).to(dtype).permute(2, 0, 1)
    copied = pinned_copy(value, CUDA)
    assert torch.equal(copied, value) and copied.stride() == value.stride() and copied.dtype is dtype
    assert cudart.registered == {copied.data_ptr(): mmap.PAGESIZE}


def test_memory_of_gradients_is_used_again(cudart: Cudart) -> None:
    gradients = PinnedGradients(CUDA)
    like = [torch.randn(4, 6).t(), torch.randn(2, 2), torch.randn(4, 6)[:, ::2], torch.empty(0, 3)]
    for _ in range(3):
        made = [gradients.empty_like(value) for value in like]
        for own, value in zip(made, like, strict=True):
            expected = torch.empty_like(value)
            assert (own.shape, own.stride(), own.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert len({own.data_ptr() for own in made}) == 4
        del made, own
        assert len(cudart.registered) == cudart.calls == 3
    kept = gradients.empty_like(like[0])
    del gradients
    gc.collect()
    assert cudart.registered == {kept.data_ptr(): mmap.PAGESIZE} and cudart.calls == 3
    del kept
    assert not cudart.registered


def test_what_fails_leaves_nothing_behind_and_says_what_for(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = []
    ones = torch.ones

    def failing(*size: int, device: torch.device) -> torch.Tensor:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")  # that of cudaHostRegister, which was not asked for

    monkeypatch.setattr(torch, "ones", failing)
    buffers = HostBuffers(CUDA)
    cudart.fails_with = 2
    with pytest.raises(HostMemoryError, match="values that leave the device: allocating 100 B failed") as raised:
        buffers.take(100)
    assert "cudaHostRegister of 100 bytes: out of memory" in str(raised.value.__cause__)
    assert kernels == [CUDA] and buffers.bytes == 0 and not cudart.registered
    cudart.fails_with = 700
    with pytest.raises(RuntimeError, match="an illegal memory access") as other:
        buffers.take(100)
    assert not isinstance(other.value, HostMemoryError)
    monkeypatch.setattr(torch, "ones", ones)
    cudart.fails_with = 0
    assert buffers.take(100).nbytes == buffers.bytes == 100
    with pytest.raises(HostMemoryError), allocating_on_host(2**60, "weights", ""):
        pinned_empty(2**60, CUDA)


def test_what_it_takes() -> None:
    assert [pinned_bytes(size, "cpu") for size in (1, 5000)] == [1, 5000]
    assert [pinned_bytes(size * mmap.PAGESIZE + 1, "cuda") for size in (0, 4)] == [mmap.PAGESIZE, 5 * mmap.PAGESIZE]


class _Stream:
    """A stream that has work to do."""

    is_busy = True

    def query(self) -> bool:
        return not self.is_busy


@pytest.fixture
def waited(cudart: Cudart, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device at work: what the host has waited for, after which it is idle."""
    stream, waited_for = _Stream(), []

    def wait(index: int) -> None:
        waited_for.append(index)
        stream.is_busy = False

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1 - index)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(pinned_memory, "_streams_of", lambda index: (stream,))
    monkeypatch.setattr(pinned_memory, "_retired", deque())
    monkeypatch.setattr(pinned_memory, "_devices", set())
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    return waited_for


def test_nothing_waits_where_a_tensor_dies(cudart: Cudart, waited: list[int]) -> None:
    memory = pinned_empty(100, CUDA)
    address = memory.data_ptr()
    del memory
    assert address in cudart.registered and not waited
    other = pinned_empty(100, CUDA)
    assert waited == [0]
    assert len(cudart.registered) == 1
    del other  # the device is idle now
    assert not cudart.registered and waited == [0]


def test_pages_are_released_when_the_device_is_found_idle(cudart: Cudart, waited: list[int]) -> None:
    memory = pinned_empty(100, CUDA)
    del memory
    release_idle_pages()
    assert len(cudart.registered) == 1
    torch.cuda.synchronize(0)
    waited.clear()
    release_idle_pages()
    assert not cudart.registered and not waited


def test_gradients_that_copies_may_read_are_written_over_only_after_a_wait(cudart: Cudart, waited: list[int]) -> None:
    gradients, like = PinnedGradients(CUDA), torch.ones(8)
    gradients.settle()
    first = gradients.empty_like(like)
    address = first.data_ptr()
    assert not waited
    del first
    assert not waited
    gradients.settle()
    assert waited == [0]
    second = gradients.empty_like(like)
    assert second.data_ptr() == address and cudart.calls == 1
    gradients.settle()  # a copy of what lives may be under way when it dies within the step
    assert waited == [0, 0]
    del second
    assert gradients.empty_like(like).data_ptr() == address and waited == [0, 0]


@pytest.mark.parametrize("raises", [False, True])
def test_pages_that_cannot_be_unregistered_stay(
    cudart: Cudart, raises: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(address: int) -> int:
        if raises:
            raise RuntimeError("a device that is lost")
        return 700

    ones: list[torch.device] = []
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones.append(device))
    unregister = cudart.cudaHostUnregister
    monkeypatch.setattr(cudart, "cudaHostUnregister", failing)
    memory = pinned_empty(100, CUDA)
    address = memory.data_ptr()
    memory.fill_(7)
    with caplog.at_level("WARNING"):
        del memory
    assert "100 bytes of pinned memory stay allocated" in caplog.text
    assert ("a device that is lost" if raises else "an illegal memory access") in caplog.text
    assert list((ctypes.c_uint8 * 100).from_address(address)) == [7] * 100
    assert ones == ([] if raises else [CUDA])
    monkeypatch.setattr(cudart, "cudaHostUnregister", unregister)
    assert pinned_empty(100, CUDA).data_ptr() != address


def test_a_forked_process_unregisters_nothing(cudart: Cudart) -> None:
    memory, gradients = pinned_empty(100, CUDA), PinnedGradients(CUDA)
    gradient = gradients.empty_like(torch.ones(8))
    held = [memory, gradient, gradients]
    del memory, gradient, gradients

    def drop() -> None:
        held.clear()
        gc.collect()
        assert len(cudart.registered) == 2

    in_forked_child(drop)
    held.clear()
    gc.collect()
    assert not cudart.registered
