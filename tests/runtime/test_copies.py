from __future__ import annotations

import pytest
import torch

from roundpipe_fx.runtime.copies import copy_to_device, copy_values_to_device


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(3, 5, 4)[:, 1:],
        torch.randn(3, 8)[:, ::2].t(),
        torch.randn(1, 4).expand(3, 4),
        torch.randn(()).expand(2, 3),
        torch.randn(2, 5, 1)[:, 1:].expand(2, 4, 6),
        torch.randn(0, 3),
    ],
)
def test_what_is_sent_lies_as_it_did(value: torch.Tensor) -> None:
    sent = copy_to_device(value, torch.device("meta"))
    assert sent.device.type == "meta" and (sent.shape, sent.stride()) == (value.shape, value.stride())
    assert sent.untyped_storage().nbytes() <= value.untyped_storage().nbytes()
    here = copy_to_device(value, torch.device("cpu"))
    assert torch.equal(here, value)


def test_windows_are_sent_apart() -> None:
    windows = torch.arange(6.0).unfold(0, 3, 1)
    assert copy_to_device(windows, torch.device("meta")).shape == (4, 3)
    assert torch.equal(copy_to_device(windows, torch.device("cpu")), windows)


def test_what_lies_in_one_memory_is_sent_once() -> None:
    memory = torch.empty(2, 5, 12, device="meta")
    given = (memory[..., 4:8], 3, memory[..., 8:].transpose(0, 1), memory[:, 1:2, :4].expand(2, 7, 4))
    sent = copy_values_to_device(given, torch.device("meta"))
    tensors = [value for value in sent if isinstance(value, torch.Tensor)]
    assert sent[1] == 3 and len(tensors) == 3
    assert len({value.untyped_storage()._cdata for value in tensors}) == 1
    assert tensors[0].untyped_storage().nbytes() <= memory.untyped_storage().nbytes()
    for value, original in zip(tensors, (given[0], *given[2:]), strict=True):
        assert (value.shape, value.stride()) == (original.shape, original.stride())
