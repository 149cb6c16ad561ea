"""The planner: what to keep and what to recompute within a byte budget.

=================  ====================================================================================
frontier           what a segment can save, for how much recomputation: minimum cuts
schedule           a choice worked out: just-in-time recomputation, simulated
blocks             the backward of one segment, in variants that take ever less memory
reduce_peak        these variants, from one to the next
block_peak         the peak of a block's steps in any sequence
order              an order in which little lives at one time
recompute_per_use  as little as possible kept from one reader to the next
alike              what makes two segments equal, so that repeated layers are solved once
chain              decisions across segments, and what they cost
solve_chain        the best decisions, by dynamic programming over memory, with nested recomputation
segment_chain      the segments as the stages of that chain
options_in_tiles   that chain, with the options that a segment has in tiles beside those without
search             candidates on the trade-off of peak and recomputation
choose             the least recomputation within the budget
sequences          checkpointing sequences of a chain (rotor)
follow_sequence    the plan that such a sequence is
=================  ====================================================================================
"""
