"""Cost models: how many seconds an operation takes, modelled."""

from roundpipe_fx.cost.of_node import annotate_node, tensor_bytes
from roundpipe_fx.cost.roofline import Roofline, flops_of, roofline_of

__all__ = ["Roofline", "annotate_node", "flops_of", "roofline_of", "tensor_bytes"]
