"""Nearly every operator of real models' training steps is described."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_fx.analysis.dimensions import Dimensions, dimensions_of, operand_nodes
from roundpipe_fx.ir.joint_graph import JointGraph, tensor_values
from tests.analysis.dimensions.calls import text
from tests.capturing import capture_joint
from tests.hugging_face import MODELS, language_batch, llama

NOT_DESCRIBED = {"aten.native_dropout.default", "aten.histc.default", "aten._grouped_mm.default"}
"""Random numbers, and what a mixture of experts does with its routes."""


def captured(make: Callable[[], nn.Module], batch: dict[str, Any], dynamic: bool = False) -> JointGraph:
    torch.manual_seed(0)
    model = make()
    if dynamic:
        for tensor in {id(tensor): tensor for tensor in batch.values()}.values():
            torch._dynamo.mark_dynamic(tensor, 0)
            torch._dynamo.mark_dynamic(tensor, 1)
    return capture_joint(lambda **inputs: model(**inputs)["loss"], **batch)


def described(joint: JointGraph) -> dict[Any, Dimensions | None]:
    calls = [node for node in joint.computed() if node.op == "call_function"]
    nodes = [node for node in calls if tensor_values(node) and node.target is not operator.getitem]
    return {node: dimensions_of(node) for node in nodes}


@pytest.mark.parametrize("name", ["bert", "t5", "resnet", "qwen3_moe"])
@pytest.mark.quick_every(4)
def test_operators_of_models(name: str) -> None:
    make, batch = MODELS[name]
    found = described(captured(make, batch()))
    assert {str(node.target) for node, dimensions in found.items() if dimensions is None} <= NOT_DESCRIBED


@pytest.mark.long
def test_symbolic_sizes_of_a_model() -> None:
    joint = captured(llama, language_batch(), dynamic=True)
    (rows, *_) = [node.meta["val"] for node in joint.primals if isinstance(node.meta["val"], torch.SymInt)]
    guards = len(rows.node.shape_env.guards)
    found = described(joint)
    assert len(rows.node.shape_env.guards) == guards
    assert not [node for node, dimensions in found.items() if dimensions is None]
    views = {text(dimensions) for node, dimensions in found.items() if node.target is torch.ops.aten.view.default}
    assert {"a b c -> ab c", "ab c -> a b c", "a b cd -> a b c d"} <= views


def test_a_loss_head_divides_into_rows() -> None:
    """From the logits to the loss and to the gradient of the weight, rows are independent or summed."""
    found = described(captured(llama, language_batch()))
    aten = torch.ops.aten
    heads = [node for node in found if node.target is aten.mm.default and 128 in node.meta["val"].shape]
    assert heads
    for node in heads:
        assert not found[node].mixed  # type: ignore[union-attr]
        assert len(operand_nodes(node)) == 2
    by_target = {node.target: text(dimensions) for node, dimensions in found.items()}
    assert by_target[aten._log_softmax.default] == "a B -> a B"
    assert by_target[aten._log_softmax_backward_data.default] == "a B, a B -> a B"
    assert by_target[aten.nll_loss_backward.default] == "(), a B, a, () -> a B"
