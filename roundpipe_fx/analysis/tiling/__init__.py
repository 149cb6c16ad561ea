"""Tiling: which runs of operations can be carried out on one tile of rows after another, and what a tile costs."""

from __future__ import annotations

from roundpipe_fx.analysis.tiling.body import BodyCosts
from roundpipe_fx.analysis.tiling.classes_in_tiles import find_online_softmaxes
from roundpipe_fx.analysis.tiling.region_kind import KINDS, NARROW, RegionKind
from roundpipe_fx.analysis.tiling.rows import elements
from roundpipe_fx.analysis.tiling.rows_read import RowSlice, find_row_slice
from roundpipe_fx.analysis.tiling.tiled_region import TileRegion, TileRegions

__all__ = [
    "KINDS",
    "NARROW",
    "BodyCosts",
    "RegionKind",
    "RowSlice",
    "TileRegion",
    "TileRegions",
    "elements",
    "find_online_softmaxes",
    "find_row_slice",
]
