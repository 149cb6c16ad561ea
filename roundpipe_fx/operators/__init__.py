"""Operators of emitted code that PyTorch has not: in-place sums, partial writes, a log-sum-exp of more digits."""
