"""Pipelining: one batch as microbatches, stages on several devices, one step as a schedule of actions."""
