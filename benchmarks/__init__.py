"""Benchmarks: side by side with peers, one command each."""
