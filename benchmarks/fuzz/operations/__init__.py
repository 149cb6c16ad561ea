"""The pool: kinds of operations that programs are drawn from, a file a family."""

from benchmarks.fuzz.operations import (
    bodies,
    buffers,
    in_place,
    indexing,
    layers,
    linear_algebra,
    losses,
    pointwise,
    randomness,
    reductions,
    user_code,
    views,
)
from benchmarks.fuzz.operations.pool import BODIES, KINDS, WEIGHTS

__all__ = ["BODIES", "KINDS", "WEIGHTS"]

_ = (
    bodies,
    buffers,
    in_place,
    indexing,
    layers,
    linear_algebra,
    losses,
    pointwise,
    randomness,
    reductions,
    user_code,
    views,
)
