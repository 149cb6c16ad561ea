"""Operand rules: the operators that may be run on synthetic operands, with the operands that are not just any numbers.

What is not named here is not run: not to see how results lie, not to measure a workspace, not to take its time. The
graph's record of the layout is kept then, and the workspace is learned in the first step. So it is with assertions
(``_functional_assert_async``), with what reads the opaque memory of another call (recurrent layers and batch norm of
cuDNN, CTC), and with packed and jagged sequences, whose offsets must fit together.

Pointwise operators need no name: PyTorch tags them, and they read no element by a number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from roundpipe_fx.analysis.cost.operand_kinds import (
    EACH,
    Absent,
    Below,
    Constant,
    Counts,
    OnHost,
    OperandKind,
    Pivots,
    UnitInterval,
)
from roundpipe_fx.operators.gradient_sums import SUMMING
from roundpipe_fx.operators.log_sum_exp import log_sum_exp

ANY_NUMBERS = """
    _conj_physical _to_copy _unsafe_view alias_copy as_strided_copy as_strided_scatter block_diag cat channel_shuffle
    clone col2im complex constant_pad_nd copy diag_embed diagonal_backward diagonal_copy diagonal_scatter
    expand_copy fill flip im2col lift_fresh_copy permute_copy pixel_shuffle pixel_unshuffle polar reflection_pad1d
    reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward
    repeat replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward replication_pad3d
    replication_pad3d_backward roll rot90 select_backward select_copy select_scatter slice_backward slice_copy
    slice_scatter split_copy split_with_sizes_copy stack t_copy trace transpose_copy tril triu unbind_copy
    unfold_backward unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes view_as_complex_copy
    view_as_real_copy view_copy zero

    bartlett_window blackman_window empty_like fft_fftfreq fft_rfftfreq full_like hamming_window hann_window
    kaiser_window logspace new_empty new_empty_strided new_full new_ones new_zeros ones_like tril_indices
    triu_indices zeros_like

    cauchy exponential geometric log_normal native_dropout _fused_dropout normal_functional rand_like randint_like
    randn_like random randperm rrelu_with_noise rrelu_with_noise_backward rrelu_with_noise_functional uniform

    _prelu_kernel _prelu_kernel_backward bucketize elu_backward floor_divide glu glu_backward hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward isin leaky_relu_backward log_sigmoid_backward
    log_sigmoid_forward mish_backward softplus_backward softshrink_backward

    all amax amin aminmax any argmax argmin bincount count_nonzero cummax cummin cumprod cumsum dist histc kthvalue
    linalg_vector_norm logcumsumexp logsumexp max mean median min mode nanmean nanmedian nansum norm prod std std_mean
    sum var var_mean _cdist_backward _cdist_forward _pdist_backward _pdist_forward

    _unique2 masked_select nonzero nonzero_static sort topk unique_consecutive unique_dim

    _log_softmax _log_softmax_backward_data _masked_softmax _masked_softmax_backward _safe_softmax _softmax
    _softmax_backward_data

    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional _fused_rms_norm
    _fused_rms_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _weight_norm_interface _weight_norm_interface_backward
    batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats_with_counts
    batch_norm_stats cudnn_batch_norm native_batch_norm native_batch_norm_backward native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward renorm

    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward

    _addmm_activation _int_mm _scaled_mm _trilinear _weight_int8pack_mm addbmm addmm addmv addr baddbmm bmm dot mm mv
    vdot

    _slow_conv2d_backward _slow_conv2d_forward conv_depthwise3d convolution convolution_backward cudnn_convolution
    cudnn_convolution_transpose slow_conv3d_forward slow_conv_transpose2d slow_conv_transpose3d

    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d _upsample_nearest_exact1d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward _upsample_nearest_exact3d _upsample_nearest_exact3d_backward
    adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward
    max_pool2d_with_indices max_pool3d_with_indices upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_linear1d upsample_linear1d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
    upsample_nearest3d_backward upsample_trilinear3d upsample_trilinear3d_backward

    binary_cross_entropy_with_logits huber_loss huber_loss_backward mse_loss mse_loss_backward smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward

    _fft_c2c _fft_c2r _fft_r2c

    _linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd cholesky cholesky_solve geqrf
    linalg_cholesky_ex linalg_cross linalg_eig linalg_eigvals linalg_householder_product linalg_inv_ex
    linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_pinv linalg_qr
    linalg_solve_triangular ormqr triangular_solve

    _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
"""
"""Operators of ATen that accept any numbers; integers are not negative."""

RULES: Mapping[str, Mapping[str, OperandKind]] = {
    "_embedding_bag": {"indices": Below("weight", 0), "offsets": Constant(0)},
    "_embedding_bag_backward": {
        "indices": Below("num_weights"),
        "offsets": Constant(0),
        "offset2bag": Below("grad", 0),
        "maximum_indices": Below("num_weights"),
    },
    "_embedding_bag_dense_backward": {
        "indices": Below("num_weights"),
        "offset2bag": Below("grad", 0),
        "maximum_indices": Below("num_weights"),
    },
    "_embedding_bag_forward_only": {"indices": Below("weight", 0), "offsets": Constant(0)},
    "_embedding_bag_per_sample_weights_backward": {
        "indices": Below("weight", 0),
        "offsets": Constant(0),
        "offset2bag": Below("grad", 0),
    },
    "_scaled_dot_product_cudnn_attention_backward": {"cum_seq_q": Absent(), "cum_seq_k": Absent()},
    "_scaled_dot_product_efficient_attention_backward": {"philox_seed": OnHost(), "philox_offset": OnHost()},
    "_scaled_dot_product_flash_attention_backward": {"cum_seq_q": Absent(), "cum_seq_k": Absent()},
    "_standard_gamma": {"self": Constant(1)},
    "_unsafe_index": {"indices": Below("self", EACH)},
    "_unsafe_index_put": {"indices": Below("self", EACH)},
    "adaptive_max_pool2d_backward": {"indices": Below("self", -2, -1)},
    "adaptive_max_pool3d_backward": {"indices": Below("self", -3, -2, -1)},
    "bernoulli": {"self": UnitInterval(), "p": UnitInterval()},
    "binary_cross_entropy": {"self": UnitInterval(), "target": UnitInterval()},
    "binary_cross_entropy_backward": {"self": UnitInterval(), "target": UnitInterval()},
    "cholesky_inverse": {"self": Constant(1)},
    "embedding": {"indices": Below("weight", 0)},
    "embedding_dense_backward": {"indices": Below("num_weights")},
    "embedding_renorm": {"indices": Below("self", 0)},
    "fractional_max_pool2d": {"random_samples": UnitInterval()},
    "fractional_max_pool2d_backward": {"indices": Below("self", -2, -1)},
    "fractional_max_pool3d": {"random_samples": UnitInterval()},
    "fractional_max_pool3d_backward": {"indices": Below("self", -3, -2, -1)},
    "gather": {"index": Below("self", "dim")},
    "index": {"indices": Below("self", EACH)},
    "index_add": {"index": Below("self", "dim")},
    "index_copy": {"index": Below("self", "dim")},
    "index_fill": {"index": Below("self", "dim")},
    "index_put": {"indices": Below("self", EACH)},
    "index_reduce": {"index": Below("self", "dim")},
    "index_select": {"index": Below("self", "dim")},
    "linalg_ldl_solve": {"pivots": Pivots()},
    "linalg_lu_solve": {"pivots": Pivots()},
    "lu_unpack": {"LU_pivots": Pivots()},
    "masked_scatter": {"mask": Constant(0)},
    "max_pool2d_with_indices_backward": {"indices": Below("self", -2, -1)},
    "max_pool3d_with_indices_backward": {"indices": Below("self", -3, -2, -1)},
    "max_unpool2d": {"indices": Below("output_size")},
    "max_unpool3d": {"indices": Below("output_size")},
    "multi_margin_loss": {"target": Below("self", -1)},
    "multi_margin_loss_backward": {"target": Below("self", -1)},
    "multilabel_margin_loss_backward": {"target": Below("self", -1)},
    "multilabel_margin_loss_forward": {"target": Below("self", -1)},
    "multinomial": {"self": Constant(1)},
    "nll_loss2d_backward": {"target": Below("self", 1)},
    "nll_loss2d_forward": {"target": Below("self", 1)},
    "nll_loss_backward": {"target": Below("self", -1)},
    "nll_loss_forward": {"target": Below("self", -1)},
    "normal": {"std": UnitInterval()},
    "poisson": {"self": UnitInterval()},
    "put": {"index": Below("self")},
    "repeat_interleave": {"repeats": Counts("output_size")},
    "scatter": {"index": Below("self", "dim")},
    "scatter_add": {"index": Below("self", "dim")},
    "scatter_reduce": {"index": Below("self", "dim")},
    "searchsorted": {"sorter": Below("sorted_sequence", -1)},
    "take": {"index": Below("self")},
}
"""Operators of ATen some of whose operands must be of a kind."""

_RESULTS_ON_HOST: Mapping[str, tuple[int, ...]] = {"_scaled_dot_product_efficient_attention": (2, 3)}
"""Positions of single numbers that CUDA kernels leave on the host, though fake kernels say they are on the device."""

RUN_ALONE = frozenset({log_sum_exp})
"""Operators of this package that may be run on any numbers, as ATen's: what they allocate follows from sizes."""

_PLAIN = frozenset(ANY_NUMBERS.split())
_NO_RULE: Mapping[str, OperandKind] = {}


@functools.cache
def kinds_of_operator(target: Any) -> Mapping[str, OperandKind] | None:
    """The operands of an operator that need certain numbers, by name; ``None``: synthetic operands are not allowed."""
    if target in SUMMING or target in RUN_ALONE:
        return _NO_RULE
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in ("aten", "prims"):
        return None
    if torch.Tag.pointwise in target.tags:
        return _NO_RULE
    if target.namespace != "aten" or target._schema.is_mutable:
        return None
    name = _name_of(target)
    return _NO_RULE if name in _PLAIN else RULES.get(name)


@functools.cache
def results_on_host(target: Any) -> tuple[int, ...]:
    """Positions of results that an operator leaves on the host, though its fake kernel says that they are elsewhere."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or torch.version.hip is not None:
        return ()
    return _RESULTS_ON_HOST.get(_name_of(target), ())


@functools.cache
def reads_or_leaves_on_host(target: Any) -> bool:
    """Return whether an operator on a device reads single numbers on the host, or leaves some there."""
    kinds = kinds_of_operator(target) or {}
    return bool(results_on_host(target)) or any(isinstance(kind, OnHost) for kind in kinds.values())


def _name_of(target: torch._ops.OpOverload) -> str:
    return target._schema.name.removeprefix("aten::")


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; those of functions that are no operators by position."""
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else map(str, range(len(args)))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def kinds_of_call(target: Any, arguments: Mapping[str, Any]) -> Mapping[str, OperandKind] | None:
    """The operands of a call that must be of a kind, by name; ``None``: it must not be run on synthetic operands.

    Args:
        target: an operator.
        arguments: by name, with fake tensors.
    """
    kinds = kinds_of_operator(target)
    if kinds is None:
        return None
    present = {name: kind for name, kind in kinds.items() if arguments.get(name) is not None}
    return present if all(kind.exists(arguments[name], arguments) for name, kind in present.items()) else None


def may_run_alone(node: fx.Node) -> bool:
    """Return whether a node's operator may be run on synthetic operands like its own: the one place that decides it."""
    return kinds_of_call(node.target, arguments_of_node(node)) is not None


def arguments_of_node(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by name, with its operands' values."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("val"))
    return arguments_of(node.target, args, kwargs)
