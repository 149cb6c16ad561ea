"""The passes, one a file, in the order in which they run.

Each is a plain function on the joint graph plus what it needs as arguments. A pass knows the graph view
(:mod:`roundpipe_fx.ir.joint_graph`) and plain data, never the runtime and never another pass.

====================  ====================================================================================
conjugate_numbers     the conjugate of a number is a number
packed_gradients      what a recurrent module on packed sequences adds to a gradient, in autograd's order
masks                 indexing by a mask becomes one ``nonzero`` and integer indexing
batch_norm            its gradient reads no running statistics, so none are kept for it
dropout               on the CPU, the drawing of a mask and two products
interpolation         indexing that repeats the nearest neighbour becomes the kernel that does it
storage_copies        operators that would copy a whole storage copy what is theirs
layouts               values lie in memory as the graph says
redundant_views       views that show what an earlier value shows already are dropped
annotate              phase, bytes and modelled seconds of each node
workspaces            bytes that kernels allocate for themselves
hoist_host_syncs      what asks the device a question is hoisted: it runs once, in the forward
recompute_regions     checkpoints, scopes and saved data of the user's: what must and must not be kept
fuse_costs            for a stage compiler that fuses: seconds of what is fused
tied_gradients        in a pipeline, what several uses of a parameter add to its gradient is returned apart
segments              narrow places of the forward; backward nodes go to the segment they belong to
stages                consecutive segments become pipeline stages
rounds                the same for RoundPipe's dispatch, where forward and backward are cut apart
cse                   where all is kept within a budget, values that equal an earlier one are that one
apply_remat_schedule  what is recomputed, when and in which form, as explicit nodes, whatever decided it
early_recompute       without a budget: what else of the backward may run before the incoming gradients arrive
split_backward        gradients of parameters in modules of their own, for schedules that put them off
rng                   seeded operations that run again are replayed from their saved generator state
accumulate_gradients  in a pipeline, gradients are added to those of earlier microbatches where they are made
reinplace             in a stage that runs eagerly, results are written over operands that are dead
overlap_recompute     stream-level fork and join in the program of stage calls
====================  ====================================================================================
"""
