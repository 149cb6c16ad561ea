"""Calls of normalizations, losses, convolutions and attention, by sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from roundpipe_fx.torch_private import maxima_with_offsets, positions_of_offsets
from tests.analysis.dimensions.calls import RealCall, call
from tests.analysis.dimensions.sample_sizes import Sample, Sizes, inner, real, whole

aten, prims = torch.ops.aten, torch.ops.prims


def _layer_norm(n: Sizes) -> tuple[torch.Tensor, ...]:
    x, weight, bias = real(n.a, n.b, n.c), real(n.c), real(n.c)
    return x, weight, bias, *aten.native_layer_norm(x, [n.c], weight, bias, 1e-5)[1:]


def _layer_norm_backward(n: Sizes, asked: list[bool]) -> RealCall:
    x, weight, bias, mean, rstd = _layer_norm(n)
    return call(real(n.a, n.b, n.c), x, [n.c], mean, rstd, weight, bias, asked)


def _rms_norm_backward(n: Sizes, asked: list[bool]) -> RealCall:
    x, weight = real(n.a, n.b, n.c), real(n.c)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return call(real(n.a, n.b, n.c), x, [n.c], rstd, weight, asked)


def _group_norm(n: Sizes) -> tuple[Any, ...]:
    return real(n.a, 2 * n.b, n.c, n.d), real(2 * n.b), real(2 * n.b), n.a, 2 * n.b, n.c * n.d, 2


def _group_norm_backward(n: Sizes, asked: list[bool]) -> RealCall:
    x, weight, bias, *sizes = _group_norm(n)
    _, mean, rstd = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    return call(real(*x.shape), x, mean, rstd, weight, *sizes, asked)


def _batch_norm_backward(n: Sizes) -> RealCall:
    x, weight = real(n.a + 1, n.b, n.c, n.d), real(n.b)
    running = real(n.b), inner(n.b)
    _, mean, invstd, *_ = aten._native_batch_norm_legit_functional(x, weight, None, *running, True, 0.1, 1e-5)
    return call(real(*x.shape), x, weight, *running, mean, invstd, True, 1e-5, [True, True, True])


NORMALIZATION: dict[Any, list[Sample]] = {
    aten.native_layer_norm.default: [
        lambda n: call(real(n.a, n.b, n.c), [n.c], real(n.c), real(n.c), 1e-5),
        lambda n: call(real(n.a, n.b, n.c), [n.b, n.c], None, None, 1e-5),
    ],
    aten.native_layer_norm_backward.default: [
        lambda n: _layer_norm_backward(n, [True, True, True]),
        lambda n: _layer_norm_backward(n, [True, False, False]),
    ],
    aten._fused_rms_norm.default: [
        lambda n: call(real(n.a, n.b, n.c), [n.c], real(n.c), 1e-5),
        lambda n: call(real(n.a, n.b, n.c), [n.c], None, None),
    ],
    aten._fused_rms_norm_backward.default: [
        lambda n: _rms_norm_backward(n, [True, True]),
        lambda n: _rms_norm_backward(n, [True, False]),
    ],
    aten.native_group_norm.default: [lambda n: call(*_group_norm(n), 1e-5)],
    aten.native_group_norm_backward.default: [
        lambda n: _group_norm_backward(n, [True, True, True]),
        lambda n: _group_norm_backward(n, [True, False, False]),
    ],
    aten._native_batch_norm_legit_functional.default: [
        lambda n: call(real(n.a + 1, n.b, n.c), real(n.b), real(n.b), real(n.b), inner(n.b), True, 0.1, 1e-5),
    ],
    aten.native_batch_norm_backward.default: [_batch_norm_backward],
}

REDUCTION_NUMBERS = (0, 1, 2)


def _nll(weighted: bool, reduction: int, image: bool = False) -> Sample:
    def sample(n: Sizes) -> RealCall:
        shape = (n.c, n.d) if image else ()
        scores, target = torch.log_softmax(real(n.a, n.b, *shape), 1), whole(n.b, n.a, *shape)
        return call(scores, target, inner(n.b) if weighted else None, reduction, 0)

    return sample


def _nll_backward(weighted: bool, reduction: int, image: bool = False) -> Sample:
    forward = aten.nll_loss2d_forward if image else aten.nll_loss_forward

    def sample(n: Sizes) -> RealCall:
        given = _nll(weighted, reduction, image)(n).args
        loss, total = forward(*given)
        return call(real(*loss.shape), *given, total)

    return sample


def _nlls(make: Callable[..., Sample], image: bool = False) -> list[Sample]:
    return [make(weighted, reduction, image) for weighted in (False, True) for reduction in REDUCTION_NUMBERS]


def _losses(*more: Any, numbers: Callable[..., torch.Tensor] = real) -> list[Sample]:
    def sample(reduction: int) -> Sample:
        return lambda n: call(numbers(n.a, n.b), numbers(n.a, n.b), *more, reduction)

    return [sample(reduction) for reduction in REDUCTION_NUMBERS]


def _losses_backward(
    *more: Any, numbers: Callable[..., torch.Tensor] = real, before: tuple[Any, ...] = ()
) -> list[Sample]:
    def sample(reduction: int) -> Sample:
        def make(n: Sizes) -> RealCall:
            grad = real() if reduction else real(n.a, n.b)
            return call(grad, numbers(n.a, n.b), numbers(n.a, n.b), *before, reduction, *more)

        return make

    return [sample(reduction) for reduction in REDUCTION_NUMBERS]


LOSSES: dict[Any, list[Sample]] = {
    aten.nll_loss_forward.default: [
        *_nlls(_nll),
        lambda n: call(real(n.b), whole(n.b), None, 2, -100),
        lambda n: call(real(n.b), whole(n.b), None, 0, -100),
    ],
    aten.nll_loss2d_forward.default: _nlls(_nll, True),
    aten.nll_loss_backward.default: [
        *_nlls(_nll_backward),
        lambda n: call(real(), real(n.b), whole(n.b), None, 2, -100, torch.ones((), dtype=torch.float64)),
    ],
    aten.nll_loss2d_backward.default: _nlls(_nll_backward, True),
    aten.mse_loss.default: [
        *_losses(),
        lambda n: call(real(n.a, n.b), real(n.b), 2),
        lambda n: call(real(n.b), real(n.a, n.b), 2),
        lambda n: call(real(n.a, 1), real(n.b), 2),
    ],
    aten.smooth_l1_loss.default: _losses(),
    aten.huber_loss.default: _losses(),
    aten.soft_margin_loss.default: _losses(),
    aten.binary_cross_entropy.default: [
        *_losses(None, numbers=inner),
        lambda n: call(inner(n.a, n.b), inner(n.a, n.b), inner(n.b), 2),
    ],
    aten.binary_cross_entropy_with_logits.default: [
        *_losses(None, None),
        lambda n: call(real(n.a, n.b), inner(n.a, n.b), inner(n.a, 1), inner(n.b), 2),
    ],
    aten.mse_loss_backward.default: _losses_backward(),
    aten.smooth_l1_loss_backward.default: _losses_backward(1.0),
    aten.huber_loss_backward.default: _losses_backward(1.0),
    aten.soft_margin_loss_backward.default: _losses_backward(),
    aten.binary_cross_entropy_backward.default: _losses_backward(before=(None,), numbers=inner),
}


def _convolution(
    groups: int, bias: bool, transposed: bool, backward: bool, asked: Sequence[bool] = (True,) * 3
) -> Sample:
    def sample(n: Sizes) -> RealCall:
        inward, outward = groups * n.b, groups * n.c
        x = real(n.a, inward, 6, 7)
        weight = real(*((inward, n.c) if transposed else (outward, n.b)), 3, 2)
        rest = [2, 1], [1, 0], [1, 1], transposed, [0, 0], groups
        offset = real(outward) if bias else None
        if not backward:
            return call(x, weight, offset, *rest)
        y = aten.convolution(x, weight, offset, *rest)
        return call(real(*y.shape), x, weight, [outward] if bias else None, *rest, list(asked))

    return sample


def _convolutions(backward: bool) -> Iterator[Sample]:
    for transposed in (False, True):
        for bias in (False, True):
            for groups in (1, 2):
                yield _convolution(groups, bias, transposed, backward, (True, True, bias))
    if backward:
        yield _convolution(1, False, False, True, (False, True, False))
        yield _convolution(1, True, False, True, (True, False, True))


def _planes(*more: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b, 6, 5), *more), lambda n: call(real(n.a, 6, 5), *more)]


def _pooled_backward(forward: Any, *more: Any, volume: bool = False) -> list[Sample]:
    """Gradients of pooling: the forward's arguments, and what it returned beside the result."""

    def sample(n: Sizes) -> RealCall:
        x = real(n.a, n.b, 4, 6, 5) if volume else real(n.a, n.b, 6, 5)
        y = forward(x, *more)
        if isinstance(y, tuple):
            return call(real(*y[0].shape), x, *more, y[1])
        return call(real(*y.shape), x, *more)

    return [sample]


def _resized_backward(*more: Any) -> list[Sample]:
    return [lambda n: call(real(n.a, n.b, 8, 7), [8, 7], [n.a, n.b, 4, 5], *more)]


MAX_POOL2D = [3, 2], [2, 2], [1, 1], [1, 1], False
AVG_POOL2D = [3, 2], [2, 2], [1, 1], False, True, None
MAX_POOL3D = [2, 3, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False
AVG_POOL3D = [2, 3, 2], [2, 2, 2], [0, 0, 0], False, True, None


def _maxima(n: Sizes) -> RealCall:
    return call(real(n.a, n.b, 6, 5), *MAX_POOL2D)


def _maxima_of_volumes(n: Sizes) -> RealCall:
    return call(real(n.a, n.b, 4, 6, 5), *MAX_POOL3D)


def _positions(n: Sizes) -> RealCall:
    windows, steps, padding, dilation, _ = MAX_POOL2D
    _, offsets = maxima_with_offsets(real(n.a, n.b, 6, 5), *MAX_POOL2D)
    return call(offsets, windows, [6, 5], steps, padding, dilation)


CONVOLUTIONS: dict[Any, list[Sample]] = {
    maxima_with_offsets: [_maxima, _maxima_of_volumes],
    positions_of_offsets: [_positions],
    aten.convolution.default: [*_convolutions(False)],
    aten.convolution_backward.default: [*_convolutions(True)],
    aten.max_pool2d_with_indices.default: _planes([2, 2]),
    aten.max_pool2d_with_indices_backward.default: _pooled_backward(aten.max_pool2d_with_indices, *MAX_POOL2D),
    aten.avg_pool2d.default: _planes([2, 2]),
    aten.avg_pool2d_backward.default: _pooled_backward(aten.avg_pool2d, *AVG_POOL2D),
    aten._adaptive_avg_pool2d.default: _planes([2, 3]),
    aten._adaptive_avg_pool2d_backward.default: [lambda n: call(real(n.a, n.b, 2, 3), real(n.a, n.b, 6, 5))],
    aten.upsample_nearest2d.default: _planes([8, 7])[:1],
    aten.upsample_nearest2d_backward.default: _resized_backward(),
    aten._upsample_nearest_exact2d.default: _planes([8, 7])[:1],
    aten._upsample_nearest_exact2d_backward.default: _resized_backward(),
    aten.upsample_bilinear2d.default: _planes([8, 7], False)[:1],
    aten.upsample_bilinear2d_backward.default: _resized_backward(False),
    aten.upsample_bicubic2d.default: _planes([8, 7], False)[:1],
    aten.upsample_bicubic2d_backward.default: _resized_backward(False),
    aten.reflection_pad2d.default: _planes([1, 2, 0, 1]),
    aten.reflection_pad2d_backward.default: [lambda n: call(real(n.a, n.b, 7, 8), real(n.a, n.b, 6, 5), [1, 2, 0, 1])],
    aten.replication_pad2d.default: _planes([1, 2, 0, 1]),
    aten.replication_pad2d_backward.default: [lambda n: call(real(n.a, n.b, 7, 8), real(n.a, n.b, 6, 5), [1, 2, 0, 1])],
    aten.max_pool3d_with_indices.default: [lambda n: call(real(n.a, n.b, 4, 6, 5), [2, 2, 2])],
    aten.max_pool3d_with_indices_backward.default: _pooled_backward(
        aten.max_pool3d_with_indices, *MAX_POOL3D, volume=True
    ),
    aten.avg_pool3d.default: [lambda n: call(real(n.a, n.b, 4, 6, 5), [2, 2, 2])],
    aten.avg_pool3d_backward.default: _pooled_backward(aten.avg_pool3d, *AVG_POOL3D, volume=True),
}


def _attention(causal: bool, masked: bool, groups: bool = False) -> Sample:
    def sample(n: Sizes) -> RealCall:
        rows, width = n.c, 8
        keys, heads = rows if causal else n.d, n.b * n.a if groups else n.b
        query, key, value = real(n.a, heads, rows, width), real(n.a, n.b, keys, width), real(n.a, n.b, keys, width)
        mask = real(n.a, heads if groups else 1, rows, keys) if masked else None
        return call(query, key, value, 0.0, causal, attn_mask=mask)

    return sample


def _attention_backward(causal: bool, masked: bool, groups: bool = False) -> Sample:
    def sample(n: Sizes) -> RealCall:
        given = _attention(causal, masked, groups)(n)
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(*given.args, **given.kwargs)
        query, key, value, dropout, is_causal = given.args
        return call(real(*out.shape), query, key, value, out, logsumexp, dropout, is_causal, **given.kwargs)

    return sample


_FORMS = [(False, False), (True, False), (False, True), (False, False, True), (True, False, True), (False, True, True)]
"""Forms of attention: causal or not, with a mask or without, with fewer heads of keys than of queries or as many."""

ATTENTION: dict[Any, list[Sample]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: [_attention(*form) for form in _FORMS],
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: [_attention_backward(*form) for form in _FORMS],
}
