"""Capture: each microbatch of a step as a graph and its arguments."""
