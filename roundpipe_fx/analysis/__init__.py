"""Analyses of graphs and programs, which they do not change: liveness, memory, costs, host synchronizations."""
