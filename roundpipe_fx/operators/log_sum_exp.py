"""The log-sum-exp of single-precision numbers, in double precision.

A log-sum-exp that is rounded to single precision is off by up to 2e-6 at 32, and a probability
``exp(x - logsumexp(x))`` by as much of itself. A log-softmax is more precise, since it subtracts the maximum first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.library.custom_op("roundpipe_fx::log_sum_exp", mutates_args=())
def _log_sum_exp(self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    dims = tuple(dim)
    most = self.amax(dims, keepdim=True)
    most = most.masked_fill_(most.isinf(), 0.0)  # else differences were NaN
    total = (self - most).exp_().sum(dims, keepdim=True)
    return total.double().log_().add_(most)


@_log_sum_exp.register_fake
def _(self: torch.Tensor, dim: Sequence[int]) -> torch.Tensor:
    dims = {position % self.dim() for position in dim}
    shape = [1 if position in dims else size for position, size in enumerate(self.shape)]
    return self.new_empty(shape, dtype=torch.float64)


log_sum_exp = torch.ops.roundpipe_fx.log_sum_exp.default
"""``log_sum_exp(x, dim)``: over the dimensions ``dim``, which are kept with size 1; float64."""
