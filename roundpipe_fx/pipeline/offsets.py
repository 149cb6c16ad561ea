"""Offsets of sequences that are packed into one row (``cu_seqlens``): no rows of a batch, whatever their number.

They begin with zero, rise, and end with the size of the tensor that the sequences are packed in. Parts of them mean
nothing, and neither do all of them for a part of the tensor.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["check_offsets"]

_NAMES = re.compile(
    r"(?:^|[._\['( ])(?:cu_?seq_?lens?\w*|(?:\w+_)?offsets?|(?:\w+_)?indptr|crow_indices|(?:\w+_)?ptr)\W*$"
)
_DTYPES = (torch.int32, torch.int64)


def check_offsets(inputs: Sequence[tuple[str, Any, bool]]) -> None:
    """Refuse offsets, by their name, that nothing tells how to split; warn of tensors that look like some.

    Args:
        inputs: name, value, and whether it is split, of inputs without a specification.

    Raises:
        ValueError: an input has the name of offsets.
    """
    for label, value, is_split in inputs:
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype not in _DTYPES or len(value) < 2:
            continue
        what = "offsets of sequences, which belong to all that is packed and not to a row of the batch"
        say = (
            "Give split_input=a function, (args, kwargs, count) -> (list of args, list of kwargs), that splits between "
            "sequences, or the microbatches themselves, forward_backward(microbatches=[…]); a specification "
            "split_input=(specs of args, specs of kwargs) with 0 in its place splits it all the same, and with None "
            "every microbatch gets all of it"
        )
        if _NAMES.search(label):
            raise ValueError(f"{label} has the name of {what}. {say}.")
        others = [other for _, other, _ in inputs if isinstance(other, torch.Tensor) and other is not value]
        if is_split and _look_like_offsets(value, {size for other in others for size in other.shape}):
            warnings.warn(
                f"roundpipe_fx: {label} is split like the batch, since it has as many elements as the batch has rows, "
                f"but it looks like {what}: it begins with 0, rises, and ends with the size of another input. {say}.",
                stacklevel=5,
            )


def _look_like_offsets(value: torch.Tensor, sizes: set[int]) -> bool:
    """Whether elements are those of offsets; they are read on the CPU only, where the host does not wait for them."""
    if type(value) is not torch.Tensor or value.device.type != "cpu" or len(value) < 3:
        return False
    last = int(value[-1])
    return last in sizes and last >= len(value) and int(value[0]) == 0 and bool((value.diff() > 0).all())
