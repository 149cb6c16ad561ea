from __future__ import annotations

import torch
from torch import fx, nn

from roundpipe_fx.ir.joint_graph import is_view, module_path, viewed
from roundpipe_fx.torch_private import module_path_text
from tests.capturing import capture_joint
from tests.golden_models import TiedTransformer, UNet


def test_labels_are_the_models_names() -> None:
    tokens = torch.randint(16, (2, 4))
    joint = capture_joint(TiedTransformer(), tokens, tokens.clone())
    labels = set(joint.labels.values())
    assert {"embedding.weight", "blocks.1.attention.out.bias", "tokens", "targets"} <= labels
    assert {joint.labels[node] for node in joint.parameters} == labels - {"tokens", "targets"}
    assert len(joint.tangents) == 1 and joint.num_forward_outputs == 1


def test_mutated_inputs_are_known() -> None:
    joint = capture_joint(UNet(), torch.randn(2, 3, 8, 8))
    names = {joint.labels[node].rsplit(".", 1)[1] for node in joint.mutated_inputs}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}


def test_views_and_what_they_view() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return (y.t().split(1)[0].unsqueeze(0) + y.clone().view(-1)[:4]).sum()

    joint = capture_joint(run, torch.randn(4, 4, requires_grad=True))
    nodes = {node.name: node for node in joint.computed()}
    assert viewed(nodes["unsqueeze"]) is nodes["exp"] and viewed(nodes["exp"]) is nodes["exp"]
    assert is_view(nodes["split"]) and is_view(nodes["getitem"]) and not is_view(nodes["clone"])


def test_where_a_node_comes_from() -> None:
    joint = capture_joint(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4))
    (tanh,) = [node for node in joint.computed() if node.name == "tanh"]
    assert module_path(tanh, module_path_text) == "1"


def test_module_paths_of_all_spellings() -> None:
    assert module_path_text("L['self']._modules['h']._modules['0']._modules['ln']") == "h.0.ln"
    assert module_path_text("L['self'].h.0.ln") == "h.0.ln"
    assert module_path_text("L['self']") == ""


def test_a_copy_is_that_of_fx() -> None:
    tokens = torch.randint(16, (2, 4))
    joint = capture_joint(TiedTransformer(), tokens, tokens.clone())
    expected = fx.Graph()
    expected.output(expected.graph_copy(joint.graph, {}))
    copied = joint.copy().graph
    assert str(copied) == str(expected)
    for own, other in zip(copied.nodes, expected.nodes, strict=True):
        assert own.name == other.name and own.type == other.type
        assert own.op == "output" or own.meta.keys() == other.meta.keys()
        assert [user.name for user in own.users] == [user.name for user in other.users]
