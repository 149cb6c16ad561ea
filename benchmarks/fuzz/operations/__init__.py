"""The pool: kinds of operations that programs are drawn from, a file a family."""

# What a seed draws depends on the order of the kinds, so on the order of these imports.
# isort: off
from benchmarks.fuzz.operations import (
    bodies,
    buffers,
    in_place,
    indexing,
    linear,
    convolutions,
    norms,
    pooling,
    attention,
    recurrence,
    embeddings,
    linear_algebra,
    losses,
    pointwise,
    randomness,
    reductions,
    user_code,
    views,
)
from benchmarks.fuzz.operations.pool import BODIES, KINDS, WEIGHTS
# isort: on

__all__ = ["BODIES", "KINDS", "WEIGHTS"]

_ = (
    bodies,
    buffers,
    in_place,
    indexing,
    linear,
    convolutions,
    norms,
    pooling,
    attention,
    recurrence,
    embeddings,
    linear_algebra,
    losses,
    pointwise,
    randomness,
    reductions,
    user_code,
    views,
)
