"""A host that runs out of memory during a step: the error says what it was for, nothing is lost, and the next step
works. tests/gpu/test_offloaded.py has gradients that leave a device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import roundpipe_fx
from roundpipe_fx.pipeline.step import offloaded
from roundpipe_fx.pipeline.step.offloaded import Offloaded
from roundpipe_fx.runtime import host_buffers
from roundpipe_fx.runtime.host_buffers import HostBuffers, allocating_on_host
from tests.pipeline.steps import Blocks, batch_of, squares, step_batch

PIN = Offloaded.pin  # which the fixture below replaces


def _fails_at(count: int, function: Callable[..., Any], text: str) -> Callable[..., Any]:
    """The function, which fails when it is called for the n-th time with memory of the host to be pinned."""
    calls = 0

    def failing(*given: Any, **how: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            raise RuntimeError(text)
        return function(*given, **how)

    return failing


@pytest.mark.usefixtures("on_the_host")
def test_weights_that_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Blocks(depth=3), step_batch()
    reference = copy.deepcopy(model)
    options = {"devices": ["cpu"], "num_microbatches": 2, "stages": 3}
    expected = roundpipe_fx.compile(reference, **options).forward_backward(**batch)
    monkeypatch.setattr(Offloaded, "pin", PIN)
    pinned: list[int] = []

    def pinned_copy(value: torch.Tensor, device: torch.device) -> torch.Tensor:
        made = value.clone()
        pinned.append(made.data_ptr())
        return made

    monkeypatch.setattr(offloaded, "pinned_copy", _fails_at(3, pinned_copy, "CUDA error: out of memory"))
    compiled = roundpipe_fx.compile(model, **options)
    with pytest.raises(roundpipe_fx.HostMemoryError, match=r"for the model's weights in pinned .*: allocating"):
        compiled.forward_backward(**batch)
    assert len(pinned) == 2 and all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, model.parameters(), reference.parameters()))
    assert torch.equal(compiled.forward_backward(**batch), expected)
    assert pinned == [parameter.data_ptr() for parameter in model.parameters()]  # each once
    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


@pytest.mark.usefixtures("on_the_host")
def test_values_that_cannot_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[HostBuffers] = []
    keep = HostBuffers.keep
    monkeypatch.setattr(HostBuffers, "keep", lambda self, sizes: (pools.append(self), keep(self, sizes))[1])
    model = Blocks(32, 4)
    x, y = batch_of(512, 32)
    compiled = roundpipe_fx.compile(model, devices=["cpu"], num_microbatches=4, memory_budget=0.0, loss_reduction="sum")
    expected = compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert compiled.plan.pipeline.sent_values > 3
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    held = pools[0].bytes
    assert held > 0
    pools[0].keep(())  # so that they are allocated anew
    with monkeypatch.context() as patch:
        text = "DefaultCPUAllocator: can't allocate memory"
        patch.setattr(host_buffers, "pinned_empty", _fails_at(3, host_buffers.pinned_empty, text))
        with pytest.raises(roundpipe_fx.HostMemoryError, match=r"for values that leave the device: alloc.* fail"):
            compiled.forward_backward(x, labels=y, loss_fn=squares)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(compiled.forward_backward(x, labels=y, loss_fn=squares), expected)
    assert all(torch.equal(own.grad, other) for own, other in zip(model.parameters(), gradients, strict=True))
    assert pools[0].bytes == held


def test_what_the_error_says() -> None:
    buffers = HostBuffers(torch.device("cpu"))
    with pytest.raises(roundpipe_fx.HostMemoryError, match=r"allocating .* Such values have 0 B"):
        buffers.take(2**60)
    assert buffers.bytes == 0 and buffers.take(8).nbytes == buffers.bytes == 8
    with pytest.raises(RuntimeError, match="an illegal memory access"), allocating_on_host(8, "weights", "Do not."):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _anonymous_bytes() -> int:
    """Bytes of this process that are no part of a file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads what Linux tells of a process")
def test_weights_of_a_folder_are_copied_once_from_its_files_into_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=8, vocab_size=4096
    )
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    gc.collect()
    before = _anonymous_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 50 * 2**20 and _anonymous_bytes() - before < size / 4  # they are where the files are mapped
    own = Offloaded([torch.device("cpu")])
    own.tensors = {id(parameter): parameter for parameter in model.parameters()}
    addresses = {parameter.data_ptr() for parameter in model.parameters()}
    PIN(own)
    assert addresses.isdisjoint(parameter.data_ptr() for parameter in model.parameters())  # all are pinned
    assert _anonymous_bytes() - before < 1.25 * size
