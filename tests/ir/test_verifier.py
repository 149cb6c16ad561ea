"""The verifier finds each thing that a pass may break, and names the pass and the node."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import fx

from roundpipe_fx.ir.joint_graph import JointGraph, Mark, Phase
from roundpipe_fx.ir.verifier import InvalidGraphError, snapshot, verify
from tests.graph_text import joint_of

TEXT = """
def joint(
    x: float32[4, 8],
    w: float32[8, 8],
    tangents_1: float32[4, 8],
):
    # forward, stage 0, segment 0
    mm: float32[4, 8] = aten.mm.default(x, w)
    # forward, stage 1, segment 1
    tanh: float32[4, 8] = aten.tanh.default(mm)
    # backward, stage 1, segment 1
    tanh_backward: float32[4, 8] = aten.tanh_backward.default(tangents_1, tanh)
    # backward, stage 0, segment 0
    t: float32[8, 4] = aten.t.default(x)
    mm_1: float32[8, 8] = aten.mm.default(t, tanh_backward)
    return (tanh,), (None, mm_1)
"""


def _node(joint: JointGraph, name: str) -> fx.Node:
    return next(node for node in joint.graph.nodes if node.name == name)


def _reads_later(joint: JointGraph) -> None:
    _node(joint, "tanh").append(_node(joint, "mm"))


def _lacks_a_value(joint: JointGraph) -> None:
    del _node(joint, "mm").meta["val"]


def _forward_reads_gradient(joint: JointGraph) -> None:
    _node(joint, "tanh").replace_input_with(_node(joint, "mm"), _node(joint, "tangents_1"))


def _forward_is_backward(joint: JointGraph) -> None:
    _node(joint, "mm").meta[Mark.PHASE] = Phase.BACKWARD


def _weight_is_waited_for(joint: JointGraph) -> None:
    _node(joint, "tanh_backward").meta[Mark.PHASE] = Phase.WEIGHT


def _stages_swapped(joint: JointGraph) -> None:
    _node(joint, "mm").meta[Mark.STAGE] = 2


def _segments_swapped(joint: JointGraph) -> None:
    _node(joint, "tanh_backward").meta[Mark.SEGMENT] = -1


def _lacks_a_mark(joint: JointGraph) -> None:
    del _node(joint, "t").meta[Mark.STAGE]


def _writes_a_mark(joint: JointGraph) -> None:
    _node(joint, "mm").meta[Mark.MUST_SAVE] = "a whim"


def _loses_an_input(joint: JointGraph) -> None:
    node = _node(joint, "w")
    node.replace_all_uses_with(_node(joint, "x"))
    joint.graph.erase_node(node)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (_reads_later, "'tanh'.*it reads 'mm', which comes later in the graph"),
        (_lacks_a_value, "'mm'.*it has no value"),
        (_forward_reads_gradient, "'tanh'.*is forward and reads the gradient 'tangents_1'"),
        (_forward_is_backward, "'tanh'.*is forward and reads 'mm', which is backward"),
        (_weight_is_waited_for, "'mm_1'.*is backward and reads 'tanh_backward', which is weight"),
        (_stages_swapped, "'tanh'.*is forward of stage 1 and reads 'mm' of stage 2"),
        (_segments_swapped, "'mm_1'.*is backward of segment 0 and reads 'tanh_backward' of segment -1"),
        (_lacks_a_mark, "'t'.*lacks the mark 'rpfx_stage'"),
        (_writes_a_mark, "'mm'.*its mark 'rpfx_must_save' was written"),
        (_loses_an_input, r"inputs are \['x', 'tangents_1'\], and were \['x', 'w', 'tangents_1'\]"),
    ],
)
def test_what_breaks_a_graph_is_found(breaks: Callable[[JointGraph], None], message: str) -> None:
    joint = joint_of(TEXT)
    before = snapshot(joint)
    verify(joint, "boolean_indexing", before, {"boolean_indexing", "split_backward"})
    breaks(joint)
    writer = "boolean_indexing" if breaks is _writes_a_mark else "a_users"
    with pytest.raises(InvalidGraphError, match=f"pass '{writer}'.*{message}"):
        verify(joint, writer, before, {"boolean_indexing"})


def test_a_recomputation_may_read_the_backward_of_a_later_stage() -> None:
    """That has run when it begins; the backward of its own stage has not."""
    joint = joint_of(TEXT)
    _node(joint, "t").replace_input_with(_node(joint, "x"), _node(joint, "tanh_backward"))
    _node(joint, "t").meta[Mark.PHASE] = Phase.RECOMPUTE
    verify(joint, "boolean_indexing", snapshot(joint), {"boolean_indexing"})
    _node(joint, "tanh_backward").meta[Mark.STAGE] = 0
    before = snapshot(joint)
    with pytest.raises(InvalidGraphError, match=r"'t'.*is recompute and reads 'tanh_backward', which is backward"):
        verify(joint, "boolean_indexing", before, {"boolean_indexing"})


def test_outputs_stay_as_many() -> None:
    joint = joint_of(TEXT)
    before = snapshot(joint)
    fewer = dataclasses.replace(joint, num_forward_outputs=0)
    with pytest.raises(InvalidGraphError, match="returns 0 outputs of the forward and 3 gradients"):
        verify(fewer, "boolean_indexing", before, {"boolean_indexing"})


def test_slots_of_round_pipe_are_counted_on_in_the_backward() -> None:
    """There the backward's stages have the higher numbers, and run in their order."""
    from roundpipe_fx.ir.segment import StageCut

    joint = joint_of(TEXT.replace("# backward, stage 0", "# backward, stage 2"))
    before = snapshot(joint)
    with pytest.raises(InvalidGraphError, match="runs later"):
        verify(joint, "roundpipe_slots", before, {"roundpipe_slots"})
    slots = (StageCut(0, 0, 0), StageCut(1, 1, 1), StageCut(2, 0, 0))
    verify(dataclasses.replace(joint, cuts=slots), "roundpipe_slots", before, {"roundpipe_slots"})


def test_tensors_without_data() -> None:
    assert isinstance(_node(joint_of(TEXT), "mm").meta["val"], torch._subclasses.FakeTensor)
