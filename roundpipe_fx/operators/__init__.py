"""Operators of emitted code that PyTorch has not: in-place sums of gradients, and writes to a part of a tensor."""
