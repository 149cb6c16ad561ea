"""Affine forms: formulas of indices as data, and what can be computed with them.

A form is *affine*, an offset plus a slope times each index, or a *choice* between two constants by conditions, affine
values that hold where they are at most 0. Equal values have one spelling, so forms are compared by equality. For
``columns <= rows`` in a square of 4 rows and columns, with i the row and j the column::

    rows                      Affine(slopes=(1, 0), offset=0)               i
    columns                   Affine(slopes=(0, 1), offset=0)               j
    columns <= rows           Choice({Affine((-1, 1), 0)}, True, False)     True where j - i <= 0
    columns <= rows + 3       Affine((0, 0), True)                          j - i - 3 is at most 0 everywhere
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Number = int | float


@dataclass(frozen=True)
class Affine:
    """An offset plus the sum of slope times index over the dimensions.

    Attributes:
        slopes: one for each dimension; 0 where the size is 1.
        offset: the value at index 0; for a constant of a boolean tensor a ``bool``.
    """

    slopes: tuple[int, ...]
    offset: Number

    @property
    def is_constant(self) -> bool:
        """Tell if it is the same at every index."""
        return not any(self.slopes)

    def beyond(self) -> Affine:
        """The affine value that is at most 0 exactly where this one, an integer, is more."""
        return Affine(tuple(-slope for slope in self.slopes), 1 - self.offset)


@dataclass(frozen=True)
class Choice:
    """A constant where all conditions hold, another one elsewhere.

    Attributes:
        conditions: integers; each holds where it is at most 0. A single one grows with the last index that it reads.
        outside: where one does not.
    """

    conditions: frozenset[Affine]
    inside: Number
    outside: Number


IndexForm = Affine | Choice


def plain_sizes(shape: Sequence[Any]) -> list[int]:
    """Sizes that are plain numbers: comparing a symbol would guard on it."""
    return [size for size in shape if isinstance(size, int)]


def drop_unit_slopes(form: Affine, shape: Sequence[Any]) -> Affine:
    """Without slopes in dimensions of size 1, which broadcast."""
    are_units = [isinstance(size, int) and size == 1 for size in shape]
    return Affine(
        tuple(0 if is_unit else slope for slope, is_unit in zip(form.slopes, are_units, strict=True)), form.offset
    )


def find_bounds(form: Affine, shape: Sequence[Any]) -> tuple[float, float]:
    """The least and the largest value at the indices of a shape; a symbolic size may be any."""
    lower = upper = float(form.offset)
    # Example: 1 + 2·i - j for i < 4 and j < 3: the offset is 1, i adds 0 to 6, j adds -2 to 0.
    # So the least value is -1 and the most is 7.
    for slope, size in zip(form.slopes, shape, strict=True):
        if slope:
            # A symbolic size has no upper bound: an index may be as large as one likes.
            end = slope * (size - 1 if isinstance(size, int) else math.inf)
            lower, upper = lower + min(end, 0), upper + max(end, 0)
    return lower, upper


def normalize(form: IndexForm, shape: Sequence[Any]) -> IndexForm:
    """A form in its only spelling, by which equal ones are known, without conditions that sizes decide."""
    if isinstance(form, Affine):
        return drop_unit_slopes(form, shape)
    strictest: dict[tuple[int, ...], Affine] = {}
    # Conditions that can never hold make the whole form the outside constant; those that always hold are dropped; of
    # parallel ones the strictest stays.
    for condition in form.conditions:
        condition = drop_unit_slopes(condition, shape)
        lower, upper = find_bounds(condition, shape)
        if lower > 0:
            return Affine((0,) * len(shape), form.outside)
        same_slopes = strictest.get(condition.slopes)
        if upper > 0 and (same_slopes is None or condition.offset > same_slopes.offset):
            strictest[condition.slopes] = condition
    if not strictest or (form.inside == form.outside and type(form.inside) is type(form.outside)):
        return Affine((0,) * len(shape), form.inside)
    # Canonical: a single condition grows with its last index, so "j <= i" and "not i < j" are equal.
    if len(strictest) == 1:
        (condition,) = strictest.values()
        if [slope for slope in condition.slopes if slope][-1] < 0:
            return Choice(frozenset([condition.beyond()]), form.outside, form.inside)
    return Choice(frozenset(strictest.values()), form.inside, form.outside)


def list_conditions(form: IndexForm) -> list[Affine] | None:
    """Conditions that all hold exactly where a boolean is true; ``None`` if it is not written so."""
    if isinstance(form, Choice) and (form.inside, form.outside) == (True, False):
        return [*form.conditions]
    # "False where c <= 0, else True" is "True where not c <= 0"; with two conditions that would be a union, which has
    # no form.
    if isinstance(form, Choice) and (form.inside, form.outside) == (False, True) and len(form.conditions) == 1:
        return [condition.beyond() for condition in form.conditions]
    return None


def remap_indices(form: IndexForm | None, remap: Callable[[Affine], Affine | None]) -> IndexForm | None:
    """The same values at other indices."""
    if form is None or isinstance(form, Affine):
        return None if form is None else remap(form)
    conditions = [condition for old in form.conditions if (condition := remap(old)) is not None]
    known = len(conditions) == len(form.conditions)
    return Choice(frozenset(conditions), form.inside, form.outside) if known else None


def align_dims(form: IndexForm, dims: int) -> IndexForm:
    """With as many dimensions as what it is broadcast to."""

    def align(form: Affine) -> Affine:
        return Affine((0,) * (dims - len(form.slopes)) + form.slopes, form.offset)

    if isinstance(form, Affine):
        return align(form)
    return Choice(frozenset(map(align, form.conditions)), form.inside, form.outside)
