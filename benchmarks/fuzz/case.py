"""A case as plain data: the same for the same seed, and still a case when parts of it are dropped."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FEATURES", "Case", "Element", "draw_case"]

_MOST_ELEMENTS = 60

FEATURES = ("doors", "outputs", "two backwards", "batches", "forks")
"""Parts of a run that can be left out: other front doors than ``compile``; losses beside outputs, which are held
or dropped; two backwards of one call; batches that are no tensors, in pipelines; forked children."""


@dataclass(frozen=True)
class Element:
    """One drawn operation.

    Attributes:
        number: its place in what was drawn; it stays when others are dropped.
        kind: a name of the pool.
        seed: what the rest of it is drawn from: its inputs, its sizes.
        inside: the elements of its body, where it has one (a checkpoint, a loop).
    """

    number: int
    kind: str
    seed: int
    inside: tuple[Element, ...] = ()


@dataclass(frozen=True)
class Case:
    """A program and the ways to compile it.

    Attributes:
        seed: of the run that drew it.
        number: which case of that run it is.
        elements: the operations, each of which reads what those before it made.
        dtype: of parameters and inputs, ``"float64"`` or ``"float32"``.
        batch: rows of a batch, and those of another one.
        inputs: of each input its shape without the batch.
        returns: what the module returns: ``"loss"``, ``"tensor"``, ``"tuple"`` or ``"dict"``; ``"beside"``: a tuple of
            a loss and others; ``"losses"``: of two losses.
        differentiable_inputs: whether inputs get gradients.
        use: which outputs a step differentiates: ``"all"``, by one loss; the ``"first"`` or the ``"last"`` alone;
            ``"twice"``: the first, retaining the graph, then the others. With ``", dropped"`` the step lets go of all
            but its losses before the backward, else it holds them to its end.
        ways: options, as :mod:`benchmarks.fuzz.options` draws them.
    """

    seed: int
    number: int
    elements: tuple[Element, ...]
    dtype: str
    batch: tuple[int, int]
    inputs: tuple[tuple[int, ...], ...]
    returns: str
    differentiable_inputs: bool
    use: str = "all"
    ways: tuple[Mapping[str, Any], ...] = field(default=())


def draw_case(
    seed: int,
    number: int,
    kinds: Mapping[str, float],
    bodies: Sequence[str],
    most: int = 60,
    among: Collection[str] = FEATURES,
) -> Case:
    """The case of this number; without its ways.

    Args:
        seed: of the run.
        number: which of its cases.
        kinds: the pool's names, with how often they are drawn.
        bodies: those of them that have a body.
        most: elements at most.
        among: those of :data:`FEATURES` that it may have.
    """
    rng = random.Random(f"{seed} {number}")
    # Small graphs are quicker and fail as often by operation; some are large, for what only size shows.
    count = min(most, _MOST_ELEMENTS, 5 + int(rng.expovariate(1 / 12)))
    names, weights = list(kinds), list(kinds.values())
    favourites = rng.choices(names, weights, k=4)

    def element(place: int, depth: int) -> Element:
        kind = rng.choice(favourites) if rng.random() < 0.15 else rng.choices(names, weights)[0]
        inside: tuple[Element, ...] = ()
        if kind in bodies:
            size = rng.randint(1, 4) if depth < 2 else 1
            inside = tuple(element(100 * (place + 1) + own, depth + 1) for own in range(size))
            if depth >= 2:
                inside = tuple(one for one in inside if not one.inside)
        return Element(place, kind, rng.getrandbits(32), inside)

    elements = tuple(element(place, 0) for place in range(count))
    inputs = tuple(_shape(rng) for _ in range(rng.choice([1, 1, 2, 2, 3])))
    case = Case(
        seed,
        number,
        elements,
        rng.choice(["float64", "float64", "float64", "float32"]),
        rng.choice([(6, 4), (6, 5), (4, 6), (5, 8), (8, 3), (12, 6)]),
        inputs,
        rng.choice(["loss", "loss", "tensor", "tuple", "dict"]),
        rng.random() < 0.5,
    )
    # Drawn apart, so that what a run leaves out changes nothing else.
    own = random.Random(f"{seed} {number} outputs")
    returns = own.choice(["beside", "beside", "losses"]) if own.random() < 0.4 else case.returns
    use = _use(own, returns)
    if "outputs" not in among:
        returns, use = case.returns, "twice" if use.startswith("twice") else "all"
    if "two backwards" not in among and use.startswith("twice"):
        use = "all"
    return dataclasses.replace(case, returns=returns, use=use)


def _use(rng: random.Random, returns: str) -> str:
    which = {
        "loss": ["all"] * 4 + ["twice"],
        "tensor": ["all"] * 4 + ["twice"],
        "tuple": ["all", "all", "all", "first", "last", "twice"],
        "dict": ["all", "all", "all", "first", "last", "twice"],
        "beside": ["first"] * 5 + ["all", "last", "twice"],
        "losses": ["twice", "twice", "first", "last", "all"],
    }
    use = rng.choice(which[returns])
    return f"{use}, dropped" if rng.random() < (0 if returns == "loss" else 0.4) else use


def _shape(rng: random.Random) -> tuple[int, ...]:
    dims = rng.choice([1, 1, 2, 2, 3])
    if dims == 1:
        return (rng.choice([3, 7, 8, 16]),)
    if dims == 2:
        return (rng.choice([3, 7, 9]), rng.choice([8, 10, 16]))
    return (rng.choice([2, 4, 8]), rng.choice([2, 7, 8]), rng.choice([2, 7, 8]))
