"""Measurements on one CUDA device: ``python -m benchmarks.gpu [--minutes 8]``."""
