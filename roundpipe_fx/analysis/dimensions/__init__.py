"""Along which dimensions the work of an operation divides, and the arguments to run it on a tile."""

from roundpipe_fx.analysis.dimensions.attention import ATTENTION_FORWARDS
from roundpipe_fx.analysis.dimensions.labels import Dimensions
from roundpipe_fx.analysis.dimensions.of_node import dimensions_of
from roundpipe_fx.analysis.dimensions.operands import operand_nodes
from roundpipe_fx.analysis.dimensions.reductions import LOGARITHMS
from roundpipe_fx.analysis.dimensions.tile_arguments import arguments_on_tile

__all__ = ["ATTENTION_FORWARDS", "LOGARITHMS", "Dimensions", "arguments_on_tile", "dimensions_of", "operand_nodes"]
