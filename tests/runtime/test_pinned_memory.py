"""Memory that is registered with CUDA. Here CUDA is a table of what is registered; tests/gpu has steps."""

from __future__ import annotations

import contextlib
import gc
import mmap

import pytest
import torch
from torch import nn

from roundpipe_fx.budget import HostMemoryError
from roundpipe_fx.runtime.host_buffers import HostBuffers, allocating_on_host
from roundpipe_fx.runtime.pinned_memory import PinnedGradients, pinned_bytes, pinned_copy, pinned_empty

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
