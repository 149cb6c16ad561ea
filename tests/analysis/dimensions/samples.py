"""Calls of each operator that is described, by sizes that tests vary."""

from __future__ import annotations

import torch
from torch._decomp import get_decompositions

from tests.analysis.dimensions.layer_samples import ATTENTION, CONVOLUTIONS, LOSSES, NORMALIZATION
from tests.analysis.dimensions.pointwise_samples import COPIES, POINTWISE, ROUNDED
from tests.analysis.dimensions.reduction_samples import ALONG, PRODUCTS, REDUCTIONS
from tests.analysis.dimensions.shape_samples import CREATION, INDEXING, PARTS, VIEWS

aten = torch.ops.aten

SAMPLES = {
    **COPIES,
    **POINTWISE,
    **PRODUCTS,
    **VIEWS,
    **PARTS,
    **ALONG,
    **REDUCTIONS,
    **INDEXING,
    **CREATION,
    **NORMALIZATION,
    **LOSSES,
    **CONVOLUTIONS,
    **ATTENTION,
}
"""Calls of each operator by sizes."""

NEED_A_DEVICE = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
}
"""Operators without a kernel on the CPU."""

DECOMPOSED = get_decompositions([aten._fused_rms_norm_backward.default])
"""Operators that run as their decompositions, because the CPU has no kernel."""

WITHOUT_VALUES = {aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default}
"""Operators whose results are of any value."""

EXACT = {*COPIES, *POINTWISE, *VIEWS, *PARTS, *CREATION} - ROUNDED
"""Operators whose results on tiles are bitwise equal to the whole."""
