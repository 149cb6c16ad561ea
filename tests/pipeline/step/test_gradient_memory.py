"""Which gradients become ``.grad`` with the memory that they have, and which are copied."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundpipe_fx.pipeline.step.gradients import hand_to_autograd, receivers_of


def _stay(parts: list[torch.Tensor], others: tuple[torch.Tensor, ...] = ()) -> list[bool]:
    """Hand over some gradients; whether each is in ``.grad`` with the memory that it had."""
    parameters = [nn.Parameter(torch.zeros(part.shape)) for part in parts]
    gradients = {id(parameter): part for parameter, part in zip(parameters, parts, strict=True)}
    expected, places = [part.clone() for part in parts], [part.data_ptr() for part in parts]
    hand_to_autograd(receivers_of([parameters], []), [parameters], [others], gradients)
    for parameter, value in zip(parameters, expected, strict=True):
        assert parameter.grad is not None and torch.equal(parameter.grad, value)
    return [parameter.grad.data_ptr() == place for parameter, place in zip(parameters, places, strict=True)]


def test_gradients_that_were_averaged_as_one_tensor_stay_in_it() -> None:
    whole = torch.randn(16 + 16 + 32)
    assert _stay([whole[:6].view(2, 3), whole[16:32], whole[32:]]) == [True] * 3  # the first leaves 40 bytes of 64
    whole = torch.randn(16 + 16)
    assert _stay([whole[16:20], whole[:16]]) == [True] * 2


@pytest.mark.parametrize(
    ("parts", "size"),
    [
        ([(0, 6), (5, 16)], 21),  # one element is both's
        ([(0, 6), (0, 6)], 6),
        ([(0, 6), (33, 16)], 64),  # more between them than aligns the second
        ([(16, 16), (32, 16)], 48),  # and before
        ([(0, 16), (16, 16)], 1024),  # and behind
        ([(0, 6)], 16),
    ],
)
def test_gradients_that_share_elements_or_leave_memory_unused_are_copied(
    parts: list[tuple[int, int]], size: int
) -> None:
    whole = torch.randn(size)
    assert _stay([whole[start : start + length] for start, length in parts]) == [False] * len(parts)


def test_gradients_in_the_memory_of_an_output_are_copied() -> None:
    whole = torch.randn(32)
    assert _stay([whole[:16], whole[16:]], (whole,)) == [False, False]
    transposed = torch.randn(4, 4)
    assert _stay([transposed.t(), torch.randn(3)]) == [False, True]  # a parameter's gradient has its strides
