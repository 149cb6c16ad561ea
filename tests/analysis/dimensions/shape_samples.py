"""Calls of operators that rearrange, index or create tensors, by sizes."""

from __future__ import annotations

from typing import Any

import torch

from tests.analysis.dimensions.calls import call
from tests.analysis.dimensions.sample_sizes import Sample, real, whole

aten, prims = torch.ops.aten, torch.ops.prims


def _reshapes() -> list[Sample]:
    return [
        lambda n: call(real(n.a * n.b, n.c), [n.a, n.b, n.c]),
        lambda n: call(real(n.a, n.b, n.c), [n.a * n.b, n.c]),
        lambda n: call(real(n.a, n.b, n.c), [n.a * n.b * n.c]),
        lambda n: call(real(n.a, n.b * n.c), [n.a * n.b, n.c]),
        lambda n: call(real(6 * n.a, 4), [3 * n.a, 8]),
        lambda n: call(real(n.a, 4, 6), [n.a, 6, 4]),
        lambda n: call(real(n.a, 6, 4, n.b), [n.a, 2, 3, 4 * n.b]),
        lambda n: call(real(n.a, 1, n.b), [1, n.a, n.b, 1]),
        lambda n: call(real(n.a, n.b), [-1]),
        lambda n: call(real(1, 1), []),
    ]


VIEWS: dict[Any, list[Sample]] = {
    aten.view.default: _reshapes(),
    aten._unsafe_view.default: _reshapes(),
    aten.reshape.default: _reshapes(),
    aten.flatten.using_ints: [lambda n: call(real(n.a, n.b, n.c), 1, 2), lambda n: call(real(n.a, n.b, n.c))],
    aten.expand.default: [
        lambda n: call(real(n.a, 1), [n.a, n.b]),
        lambda n: call(real(n.a, 1), [n.c, -1, n.b]),
        lambda n: call(real(n.a), [n.b, n.a]),
        lambda n: call(real(), [n.b, n.a]),
    ],
    aten.repeat.default: [
        lambda n: call(real(n.a, n.b), [1, 2]),
        lambda n: call(real(n.a, n.b), [n.c, 1, 3]),
        lambda n: call(real(1, n.b), [n.c, 1]),
    ],
    aten.permute.default: [lambda n: call(real(n.a, n.b, n.c), [2, 0, -2])],
    aten.t.default: [lambda n: call(real(n.a, n.b)), lambda n: call(real(n.a))],
    aten.numpy_T.default: [lambda n: call(real(n.a, n.b, n.c))],
    aten.transpose.int: [lambda n: call(real(n.a, n.b, n.c), 0, -1), lambda n: call(real(n.a, n.b, n.c), 1, 2)],
    aten.squeeze.default: [lambda n: call(real(n.a, 1, n.b))],
    aten.squeeze.dim: [lambda n: call(real(n.a, 1, n.b), 1), lambda n: call(real(n.a, n.b), 0)],
    aten.squeeze.dims: [lambda n: call(real(n.a, 1, n.b), [0, 1]), lambda n: call(real(1, n.a, 1, n.b), [0, -2])],
    aten.unsqueeze.default: [lambda n: call(real(n.a, n.b), 1), lambda n: call(real(n.a, n.b), -1)],
    aten.view_as_real.default: [lambda n: call(torch.complex(real(n.a, n.b), real(n.a, n.b)))],
    aten.view_as_complex.default: [lambda n: call(real(n.a, n.b, 2))],
}

PARTS: dict[Any, list[Sample]] = {
    aten.slice.Tensor: [
        lambda n: call(real(n.a, n.b, n.c), 1, 1, 3),
        lambda n: call(real(n.a, n.b), 0, 0, 9223372036854775807),
        lambda n: call(real(n.a, n.b), -1, 0, n.b),
        lambda n: call(real(n.a, n.b), 0, -n.a, n.a),
        lambda n: call(real(n.a, n.b)),
        lambda n: call(real(n.a, n.b), 1, 0, n.b, 2),
    ],
    aten.slice_backward.default: [
        lambda n: call(real(n.a, n.b), [n.a, n.b + 3], 1, 3, n.b + 3, 1),
        lambda n: call(real(n.a, n.b), [n.a, n.b], 1, 0, 9223372036854775807, 1),
    ],
    aten.slice_scatter.default: [
        lambda n: call(real(n.a, n.b + 2), real(n.a, n.b), 1, 2),
        lambda n: call(real(n.a, n.b), real(n.a, n.b), 1),
    ],
    aten.select.int: [lambda n: call(real(n.a, n.b, n.c), 1, 0), lambda n: call(real(n.a, n.b), -1, -1)],
    aten.select_backward.default: [lambda n: call(real(n.a, n.c), [n.a, n.b, n.c], 1, 0)],
    aten.select_scatter.default: [lambda n: call(real(n.a, n.b, n.c), real(n.a, n.c), 1, 0)],
    aten.narrow.default: [lambda n: call(real(n.a, n.b), 1, 0, 1)],
    aten.split.Tensor: [lambda n: call(real(n.a, n.b, n.c), 2, 1), lambda n: call(real(n.a, n.b), 1, -1)],
    aten.split_with_sizes.default: [lambda n: call(real(n.a, n.b + 3, n.c), [n.b, 1, 2], 1)],
    aten.chunk.default: [lambda n: call(real(n.a, n.b), 2, 1)],
    aten.unbind.int: [lambda n: call(real(n.a, n.b, n.c), 1)],
    aten.cat.default: [
        lambda n: call([real(n.a, n.b), real(n.a, n.c)], 1),
        lambda n: call([real(n.a, n.b), real(n.c, n.b), real(1, n.b)]),
    ],
    aten.stack.default: [lambda n: call([real(n.a, n.b), real(n.a, n.b)], 1), lambda n: call([real(n.a)] * 2, -1)],
    aten.constant_pad_nd.default: [
        lambda n: call(real(n.a, n.b, n.c), [1, 2], 0.5),
        lambda n: call(real(n.a, n.b, n.c), [0, 0, 2, 0]),
        lambda n: call(real(n.a, n.b + 2), [-1, 0]),
    ],
    aten.diagonal.default: [lambda n: call(real(n.a, n.b, n.c), 0, 0, 2)],
}


INDEXING: dict[Any, list[Sample]] = {
    aten.embedding.default: [
        lambda n: call(real(7, n.a), whole(7, n.b, n.c)),
        lambda n: call(real(7, n.a), whole(7, n.b), 3),
    ],
    aten.embedding_dense_backward.default: [
        lambda n: call(real(n.b, n.c, n.a), whole(7, n.b, n.c), 7, -1, False),
        lambda n: call(real(n.b, n.a), whole(7, n.b), 7, 3, False),
        lambda n: call(real(n.b, n.a), whole(3, n.b), 3, -1, True),
    ],
    aten.index_select.default: [lambda n: call(real(n.a, n.b, n.c), 1, whole(n.b, n.d))],
    aten.gather.default: [
        lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, n.c)),
        lambda n: call(real(n.a, n.b), 0, whole(n.a, n.c, n.b)),
        lambda n: call(real(n.a + 1, n.b), 1, whole(n.b, n.a, 1)),
    ],
    aten.scatter.src: [
        lambda n: call(real(n.a, n.b), 1, torch.arange(n.b).expand(n.a, n.b).clone(), real(n.a, n.b)),
        lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, 1), real(n.a, 1)),
    ],
    aten.scatter.value: [lambda n: call(real(n.a, n.b), 0, whole(n.a, n.c, n.b), 2.5)],
    aten.scatter_add.default: [lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, n.c), real(n.a, n.c))],
    aten.scatter_reduce.two: [lambda n: call(real(n.a, n.b), 1, whole(n.b, n.a, n.c), real(n.a, n.c), "amax")],
    **{
        operator: [
            lambda n: call(real(n.a, n.b, n.c), [None, whole(n.b, n.d)]),
            lambda n: call(real(n.a, n.b, n.c), [whole(n.a, n.d, 1), whole(n.b, n.c)]),
            lambda n: call(real(n.a, n.b, n.c), [whole(n.a, n.d), None, whole(n.c, n.d)]),
            lambda n: call(real(n.a, n.b, n.c), [None, whole(n.b, n.d, 1), whole(n.c, 1, n.a)]),
        ]
        for operator in (aten.index.Tensor, aten._unsafe_index.Tensor)
    },
    aten.index_put.default: [
        lambda n: call(real(n.a, n.b), [whole(n.a, n.c)], real(n.c, n.b), True),
        lambda n: call(real(n.a, n.b), [None, whole(n.b, n.c)], real()),
        lambda n: call(real(n.a, n.b), [None, whole(n.b, n.c)], real(n.a, 1)),
    ],
    aten._unsafe_index_put.default: [
        lambda n: call(real(n.a, n.b, n.c), [None, whole(n.b, n.d), whole(n.c, n.d)], real(n.a, n.d), True)
    ],
}


def _new(*more: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b), [n.a, n.b], *more), lambda n: call(real(n.a, n.b), [n.c, n.d], *more)]


CREATION: dict[Any, list[Sample]] = {
    aten.full.default: [lambda n: call([n.a, n.b], 1.5), lambda n: call([], 1.5)],
    aten.zeros.default: [lambda n: call([n.a, n.b], dtype=torch.float64)],
    aten.ones.default: [lambda n: call([n.a, n.b])],
    aten.empty.memory_format: [lambda n: call([n.a, n.b])],
    aten.scalar_tensor.default: [lambda n: call(1.5)],
    aten.new_zeros.default: _new(),
    aten.new_ones.default: _new(),
    aten.new_empty.default: _new(),
    aten.new_full.default: _new(2.5),
    aten.arange.default: [lambda n: call(n.a)],
    aten.arange.start: [lambda n: call(1, n.a + 1)],
    aten.arange.start_step: [lambda n: call(0, 2 * n.a, 2)],
    aten.linspace.default: [lambda n: call(0.0, 1.0, n.a)],
    aten.eye.default: [lambda n: call(n.a)],
    aten.eye.m: [lambda n: call(n.a, n.b)],
}
