"""Tiling: which runs of operations can be carried out on one tile of rows after another, and what a tile costs."""

from __future__ import annotations

from roundpipe_fx.analysis.tiling.body import BodyCosts
from roundpipe_fx.analysis.tiling.classes_in_tiles import online_softmaxes
from roundpipe_fx.analysis.tiling.rows import elements
from roundpipe_fx.analysis.tiling.rows_read import RowSlice, row_slice_of
from roundpipe_fx.analysis.tiling.tiled_region import TileRegion, TileRegions

__all__ = ["BodyCosts", "RowSlice", "TileRegion", "TileRegions", "elements", "online_softmaxes", "row_slice_of"]
