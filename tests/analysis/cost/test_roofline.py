"""Flop counts are PyTorch's, but for what kernels of attention skip."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from roundpipe_fx.analysis.cost.roofline import count_call_flops
from tests.capturing import capture_joint

aten = torch.ops.aten


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (4, 7), (7, 4), (1, 5)])
def test_causal_attention_counts_the_scores_that_its_mask_leaves(queries: int, keys: int) -> None:
    query, key = torch.randn(2, 3, queries, 8), torch.randn(2, 3, keys, 8)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    result = attention(query, key, key)
    whole, causal = (
        count_call_flops(attention, (query, key, key), {"is_causal": causal}, result) for causal in (False, True)
    )
    left = int(torch.ones(queries, keys).tril().sum())
    assert whole and causal == whole * left // (queries * keys)


def test_other_operators_count_as_pytorch_counts_them() -> None:
    x, weight = torch.randn(5, 7), torch.randn(7, 3)
    with FlopCounterMode(display=False) as counter:
        torch.mm(x, weight)
    assert count_call_flops(aten.mm.default, (x, weight), {}, x @ weight) == counter.get_total_flops()


def test_the_backward_of_causal_attention_counts_less_too() -> None:
    def flops(causal: bool) -> int:
        x = torch.randn(1, 2, 16, 8, requires_grad=True)
        joint = capture_joint(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=causal).sum(), x)
        return sum(
            count_call_flops(node.target, node.args, node.kwargs, node.meta.get("val"))
            for node in joint.computed()
            if "attention" in str(node.target) and "backward" in str(node.target)
        )

    assert flops(True) == flops(False) * 17 // 32
