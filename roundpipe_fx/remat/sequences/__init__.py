"""Checkpointing sequences of a chain of layers (rotor).

===============  ======================================================================================
chain            what the layers of a chain cost: seconds and bytes
sequence         operations in order; what they peak at and take
algorithms       the optimal persistent sequence, and baselines
===============  ======================================================================================
"""
