"""Cost models: how many seconds an operation takes, modelled."""

from roundpipe_fx.cost.roofline import Roofline, flops_of, roofline_of

__all__ = ["Roofline", "flops_of", "roofline_of"]
