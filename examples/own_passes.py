"""Add passes of your own: one casts saved activations to bfloat16, another prints the size of each graph.

python examples/own_passes.py
"""

from __future__ import annotations

import torch
from torch import fx, nn

import roundpipe_fx
from roundpipe_fx import JointGraph, Pass, PassContext

aten = torch.ops.aten


def cast_saved(joint: JointGraph, context: PassContext) -> JointGraph:
    """Save float32 activations for the backward in bfloat16: half their bytes, and gradients within rounding.

    What the forward computes stays the same. Each float32 value of it that the backward reads is cast down where it is
    made, and cast up again in the backward.
    """
    if not context.training:
        return joint
    returned = set(joint.outputs)
    for node in list(joint.computed()):
        readers = [user for user in node.users if user.meta.get("partitioner_tag") == "is_backward"]
        value = node.meta["val"]
        if is_backward(node) or node in returned or not readers or not isinstance(value, torch.Tensor):
            continue
        if value.dtype is not torch.float32 or value._base is not None or not value.dim():
            continue
        with joint.graph.inserting_after(node):
            small = joint.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
        with joint.graph.inserting_before(readers[0]):
            large = joint.graph.call_function(aten._to_copy.default, (small,), {"dtype": torch.float32})
        # The cast down is the forward's although only the backward reads it.
        small.meta = {**node.meta, "partitioner_tag": "must_be_in_forward"}
        large.meta = {**readers[0].meta}
        with value.fake_mode:  # what a node makes, as a tensor without data
            small.meta["val"] = value.to(torch.bfloat16)
            large.meta["val"] = value.clone()
        for reader in readers:
            reader.replace_input_with(node, large)
    return joint


def is_backward(node: fx.Node) -> bool:
    """Whether the tracer noted an operation as the backward's."""
    return node.meta.get("partitioner_tag") == "is_backward"


def log_size(joint: JointGraph, context: PassContext) -> JointGraph:
    """Print how much is computed."""
    print(f"{sum(1 for _ in joint.computed())} operations for {context.device}")
    return joint


def edit(passes: list[Pass]) -> list[Pass]:
    """Cast before the graph is annotated, so that the plan counts the bytes that are saved; log at first."""
    place = [item.name for item in passes].index("annotate")
    passes.insert(place, Pass("cast_saved", cast_saved))
    return [Pass("log_size", log_size), *passes]


def saved_bytes(passes: object = None) -> tuple[int, torch.Tensor]:
    """Bytes of a step at its peak, and the first layer's gradient."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64)) for _ in range(8)]
    model = roundpipe_fx.compile(nn.Sequential(*layers), passes=passes, stages=1)
    x = torch.randn(4096, 64)
    model(x)[:, :8].square().mean().backward()
    return model.plan.peak_bytes, model.get_parameter("0.0.weight").grad


if __name__ == "__main__":
    plain, gradient = saved_bytes()
    cast, other = saved_bytes(edit)
    error = (other - gradient).norm() / gradient.norm()
    print(f"peak {plain / 2**20:.1f} MiB; with saved activations in bfloat16 {cast / 2**20:.1f} MiB")
    print(f"relative error of a gradient: {error:.1e}")
