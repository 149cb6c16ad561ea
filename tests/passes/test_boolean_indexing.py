"""Indexing by a mask becomes one ``nonzero`` and integer indexing."""

from __future__ import annotations

import expecttest

from roundpipe_fx.passes.boolean_indexing import expand_boolean_indexing
from tests.graph_text import after


def test_as_text_one_nonzero_for_all_that_index_by_a_mask() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    mask: bool[4],
    row: float32[8],
):
    # captured
    neg: float32[4, 8] = aten.neg.default(x)
    put: float32[4, 8] = aten.index_put.default(neg, [mask], row)
    again: float32[4, 8] = aten.index_put.default(put, [mask], row, True)
    return (again,), ()
"""
    made = after(expand_boolean_indexing, before, name="boolean_indexing")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    mask: bool[4],
    row: float32[8],
):
    # captured
    nonzero_default: int64[u0, 1].strides(1, u0) = aten.nonzero.default(mask)
    select_int: int64[u0] = aten.select.int(nonzero_default, 1, 0)
    neg: float32[4, 8] = aten.neg.default(x)
    put: float32[4, 8] = aten.index_put.default(neg, [select_int], row)
    again: float32[4, 8] = aten.index_put.default(put, [select_int], row, True)
    return (again,), ()
""",
    )


def test_as_text_integer_indexing_is_left() -> None:
    before = """\
def joint(
    x: float32[4, 8],
    rows: int64[3],
):
    # captured
    index: float32[3, 8] = aten.index.Tensor(x, [rows])
    return (index,), ()
"""
    made = after(expand_boolean_indexing, before, name="boolean_indexing")
    expecttest.assert_expected_inline(
        made,
        """\
def joint(
    x: float32[4, 8],
    rows: int64[3],
):
    # captured
    index: float32[3, 8] = aten.index.Tensor(x, [rows])
    return (index,), ()
""",
    )
