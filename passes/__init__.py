"""The passes, one a file, in the order in which they run.

Each is a plain function on the joint graph plus what it needs as arguments. A pass knows the graph view
(:mod:`roundpipe_fx.joint_graph`) and plain data, never the runtime and never another pass.

=================  ====================================================================================
masks              indexing by a mask becomes one ``nonzero`` and integer indexing
annotate           phase, bytes and modelled seconds of each node
decisions          what asks the device a question is hoisted: it runs once, in the forward
recompute_regions  checkpoints, scopes and saved data of the user's: what must and must not be kept
segments           narrow places of the forward; backward nodes go to the segment they belong to
stages             consecutive segments become pipeline stages
rematerialize      what is saved, what is recomputed, as explicit nodes
follow_schedule    within a byte budget: the backward as it was planned, instead of rematerialize and start_early
start_early        what of the backward may run before the incoming gradients arrive
rng                seeded operations that run again are replayed from their saved generator state
reinplace          in a stage that runs eagerly, results are written over operands that are dead
fuse_costs         for a stage compiler that fuses: seconds of what is fused
streams            stream-level fork and join in the program of stage calls
=================  ====================================================================================
"""
