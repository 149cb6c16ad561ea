"""The planner: what to keep and what to recompute within a byte budget.

===========  ==================================================================================
operations   the joint graph as operations and storages
frontier     what a segment can save, for how much recomputation: minimum cuts
chain        across segments: dynamic programming over memory, with nested recomputation
schedule     a choice worked out: just-in-time recomputation, simulated
order        in which order a segment's backward runs, so that little lives at one time
search       candidates on the trade-off of peak and recomputation
choose       the least recomputation within the budget
rotor        what all-or-nothing checkpointing of the same chain can do, for comparison
===========  ==================================================================================
"""
