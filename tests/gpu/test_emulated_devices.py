"""The emulated devices themselves: what real ones do, and what a test could miss without it."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.skipif("tests.emulated_cuda.plugin" not in sys.modules, reason="of the emulated devices")

MIB = 1 << 20


@pytest.fixture
def emulated() -> Any:
    from tests.emulated_cuda import cuda_module

    return cuda_module


def test_a_thread_and_stream_have_a_workspace_of_cublas() -> None:
    side = torch.Stream(torch.device("cuda:3"))
    taken = []

    def multiply() -> None:
        for _ in range(2):
            before = torch.cuda.memory_allocated("cuda:3")
            with side:
                matrix = torch.ones(2, 2, device="cuda:3")
                product = matrix @ matrix
            del matrix, product
            taken.append(torch.cuda.memory_allocated("cuda:3") - before)

    for _ in range(2):  # the second thread gets the handle of the first, unless that is still about to end
        thread = threading.Thread(target=multiply)
        thread.start()
        thread.join()
    assert taken in ([32 * MIB, 0, 0, 0], [32 * MIB, 0, 32 * MIB, 0])


def test_there_are_32_streams() -> None:
    assert len({torch.Stream(torch.device("cuda:2")).stream_id for _ in range(40)}) == 32


def test_an_event_is_not_done_at_once() -> None:
    event = torch.Event("cuda")
    torch.ones(3, device="cuda")
    event.record()
    assert [event.query(), event.query()] == [False, True]


def test_memory_that_another_stream_may_use_stays_active() -> None:
    def counted(name: str) -> int:
        return torch.cuda.memory_stats("cuda:1")[f"{name}_bytes.all.current"]

    side = torch.Stream(torch.device("cuda:1"))
    before = {name: counted(name) for name in ("allocated", "active", "reserved")}
    value = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda:1")
    value.record_stream(side)
    with side:
        torch.ones(1, device="cuda:1")
    del value
    assert (counted("allocated") - before["allocated"], counted("active") - before["active"]) == (0, 30 * MIB)
    assert counted("reserved") - before["reserved"] >= 30 * MIB
    torch.cuda.synchronize("cuda:1")
    torch.cuda.empty_cache()
    assert {name: counted(name) for name in before} == before


def test_attention_has_its_seeds_on_the_host_and_refuses_others(emulated: Any) -> None:
    on_host = [torch.randn(2, 3, 8, 4) for _ in range(3)]
    own = [value.cuda().requires_grad_() for value in on_host]
    for causal in (False, True):
        expected = [value.clone().requires_grad_() for value in on_host]
        results = [scaled_dot_product_attention(*operands, is_causal=causal) for operands in (expected, own)]
        torch.testing.assert_close(results[1].cpu(), results[0])
        for value, other in zip(
            *(
                torch.autograd.grad(result.square().sum(), operands)
                for result, operands in zip(results, (expected, own), strict=True)
            ),
            strict=True,
        ):
            torch.testing.assert_close(other.cpu(), value)
    detached = [value.detach() for value in own]
    out, sums, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(*detached, None, True, 0.5)
    assert (out.device.type, seed.device.type, offset.device.type) == ("cuda", "cpu", "cpu")
    arguments = 0.5, [True, True, True, False]
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    backward(out, *detached, None, out, sums, seed, offset, *arguments)
    with pytest.raises(RuntimeError, match="segmentation fault"):
        backward(out, *detached, None, out, sums, seed.cuda(), offset.cuda(), *arguments)
    assert emulated.device.races()  # else the test would fail


def test_a_capture_refuses_synchronizations(emulated: Any) -> None:
    value = torch.ones(1, device="cuda")
    with emulated.capturing():
        assert torch.cuda.is_current_stream_capturing()
        value.add_(1)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            value.item()
    assert value.item() == 2


def test_memory_of_the_host_that_stays_registered(emulated: Any) -> None:
    cudart: Any = torch.cuda.cudart()
    assert cudart.cudaHostRegister(1 << 30, 4096, 0) == 0
    with emulated.failing_unregistration(713):
        assert cudart.cudaHostUnregister(1 << 30) == 713
    with emulated.failing_unregistration(RuntimeError("lost")), pytest.raises(RuntimeError, match="lost"):
        cudart.cudaHostUnregister(1 << 30)
    assert cudart.cudaHostRegister(1 << 30, 4096, 0) == 712  # still mapped
    assert cudart.cudaHostUnregister(1 << 30) == 0
