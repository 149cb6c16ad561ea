"""Values travel dense and arrive with the strides that they had."""

from __future__ import annotations

import pytest
import torch

from roundpipe_fx.distributed.layout import (
    ValueLayout,
    as_dense_row,
    as_strided_tensor,
    count,
    numbers_of,
    split_numbers,
)

BASE = torch.arange(48.0).reshape(4, 6, 2)


@pytest.mark.parametrize(
    "value",
    [
        BASE,
        BASE.transpose(0, 2),
        BASE.permute(1, 2, 0),
        BASE[:, :3],
        BASE[1:, ::2],
        BASE[:1].expand(5, 6, 2),
        torch.zeros(()).expand(3, 4),
        torch.tensor(3.0),
        BASE[:0],
        BASE[:, 2:3],
    ],
    ids=str,
)
def test_strides_survive(value: torch.Tensor) -> None:
    shape, stride = tuple(value.shape), value.stride()
    flat = as_dense_row(value, shape, stride)
    assert flat.dim() == 1 and flat.is_contiguous() and flat.numel() == count(shape, stride) <= value.numel()
    other = as_strided_tensor(flat.clone(), shape, stride)
    assert other.stride() == stride and torch.equal(other, value)


def test_dense_values_are_not_copied() -> None:
    assert as_dense_row(BASE.mT, (4, 2, 6), BASE.mT.stride()).data_ptr() == BASE.data_ptr()


def test_what_depends_on_data_travels_first() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        rows = torch.nonzero(torch.ones(5))
        layouts = [
            ValueLayout.of(rows),
            ValueLayout.of(rows.shape[0]),
            ValueLayout.of(1.5),
            ValueLayout.of(True),
            ValueLayout.of(torch.ones(2)),
        ]
    assert [layout.numbers for layout in layouts] == [4, 1, 1, 1, 0]
    values = [torch.ones(3, 1, dtype=torch.int64), 3, 0.1, False, torch.ones(2)]
    assert split_numbers(layouts, numbers_of(values, layouts)) == [((3, 1), (1, 1)), 3, 0.1, False, ((2,), (1,))]
    with pytest.raises(TypeError, match="str cannot be sent"):
        ValueLayout.of("text")
