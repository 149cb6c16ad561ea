"""The order in which classes are tiled, with peaks that are given instead of planned."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from roundpipe_fx.budget import Found, Infeasible
from roundpipe_fx.planner.tile_more import tile_more
from roundpipe_fx.remat.choose import Bottleneck

Tiled = tuple[str, ...]
"""Names of the classes that have tiles, in order."""


Peaks = Mapping[Tiled, tuple[int, Tiled]]
"""By classes in tiles, the lowest peak, and the classes that hold it, those with most bytes first."""


class Classes:
    """Region classes by name, each as a whole or in two tiles."""

    setting = SimpleNamespace(options=SimpleNamespace(tiling="auto"), share=1.0)
    space = SimpleNamespace(widest_first=False)
    has_any, has_vocabulary_heads = True, False

    def __init__(self, peaks: Peaks) -> None:
        self.peaks, self.planned = peaks, list[Tiled]()
        self.of_all_kinds = self

    def plan(self, tiles: Mapping[str, int], budget: int, limit: int | None) -> Found[Any] | Infeasible[Any]:
        tiled = tuple(sorted(tiles))
        self.planned.append(tiled)
        peak, holding = self.peaks[tiled]
        if peak <= budget:
            return Found(peak)
        return Infeasible(
            minimum=peak,
            bottleneck=Bottleneck(live=tuple((name, peak) for name in holding), text="of a plan"),
        )

    def find_class_at_peak(
        self, unmet: Infeasible[Any], tiles: Any, done: Collection[str], by_vocabulary: bool
    ) -> str | None:
        return next((name for name, _ in unmet.bottleneck.live if name not in done), None)

    def choose_more_tiles(self, *_: Any) -> int:
        return 2

    def choose_quicker(self, name: str, count: int, done: Any) -> tuple[str, int]:
        return name, count

    def drop_overlapping(self, name: str, tiles: Mapping[str, int]) -> Mapping[str, int]:
        return tiles

    def is_vocabulary_head(self, name: str) -> bool:
        return False

    def most_tiles(self, name: str) -> int:
        return 2

    def tiles_of(self, tiles: Mapping[str, int]) -> Any:
        return tuple(sorted(tiles))


HEAD_MLP: Peaks = {(): (90, ("head",)), ("head",): (60, ("mlp",)), ("head", "mlp"): (40, ())}
MOVED: Peaks = {(): (50, ("norm",)), ("norm",): (51, ("attention",)), ("attention", "norm"): (30, ())}
DROPPED: Peaks = {
    (): (50, ("norm", "mlp")),
    ("norm",): (51, ("attention",)),
    ("attention", "norm"): (52, ("mlp",)),
    ("mlp",): (30, ()),
}


@pytest.mark.parametrize(
    ("peaks", "budget", "tiled"),
    [(HEAD_MLP, 95, ()), (HEAD_MLP, 60, ("head",)), (HEAD_MLP, 45, ("head", "mlp"))],
)
def test_the_class_at_the_peak_is_tiled(peaks: Peaks, budget: int, tiled: Tiled) -> None:
    classes: Any = Classes(peaks)
    assert tile_more(classes, budget) == Found((tiled, peaks[tiled][0]))


def test_tiles_that_move_the_peak_are_kept_for_those_that_lower_it_with_them() -> None:
    classes: Any = Classes(MOVED)
    assert tile_more(classes, 30) == Found((("attention", "norm"), 30))


def test_tiles_that_move_the_peak_and_lower_it_with_no_others_are_dropped() -> None:
    classes: Any = Classes(DROPPED)
    assert tile_more(classes, 30) == Found((("mlp",), 30))
    assert classes.planned == [(), ("norm",), ("attention", "norm"), ("mlp",)]
