"""What may leave for the host between forward and backward: one predicate, for programs and for schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from roundpipe_fx.compiler.values_on_host import may_be_on_host
from roundpipe_fx.ir.joint_graph import JointGraph, Mark
from roundpipe_fx.passes.layouts import restore_layouts
from roundpipe_fx.torch_private import fakes_on

aten = torch.ops.aten


@pytest.fixture
def attention() -> JointGraph:
    """Memory-efficient attention with dropout and its gradient, as fake CUDA kernels describe them."""
    fake = fakes_on("cuda")
    q = fake(torch.ones(2, 4, 16, 8))

    def run(q: torch.Tensor) -> Any:
        out, sums, seed, offset = aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.1)
        made = aten._scaled_dot_product_efficient_attention_backward(
            out, q, q, q, None, out, sums, seed, offset, 0.1, [True, True, True, False]
        )
        return out, sums, made[0]

    with q.fake_mode:  # type: ignore[attr-defined]
        module = make_fx(run)(q)
    return JointGraph(module=module, num_forward_outputs=2)


def _results(joint: JointGraph) -> list[fx.Node]:
    (node,) = [n for n in joint.computed() if n.target is aten._scaled_dot_product_efficient_attention.default]
    return sorted(node.users, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]


def test_seeds_stay_where_they_are(attention: JointGraph) -> None:
    """Even if the user wants all of the attention's results on the host: kernels read them there."""
    results = _results(attention)
    assert [item.meta["val"].device.type for item in results] == ["cuda"] * 4  # as the fake kernel says
    assert [may_be_on_host(item, "cuda") for item in results] == [True, True, False, False]
    for item in results:
        item.meta[Mark.ON_HOST] = True
    assert [may_be_on_host(item, "cuda") for item in results] == [True, True, False, False]


def test_seeds_are_recorded_on_the_host(attention: JointGraph) -> None:
    """So nothing copies them to a device, and other processes receive them on the host."""
    joint = restore_layouts(attention, None)
    assert [item.meta["val"].device.type for item in _results(joint)] == ["cuda", "cuda", "cpu", "cpu"]
    (gradient,) = [
        n for n in joint.computed() if n.target is aten._scaled_dot_product_efficient_attention_backward.default
    ]
    assert gradient.meta["val"][0].device.type == "cuda"
    joint.graph.lint()
