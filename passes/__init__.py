"""The passes, one a file. :mod:`roundpipe_fx.passes.pipeline` lists them in the order in which they run.

Each is a plain function on the joint graph plus what it needs as arguments. A pass knows the graph view
(:mod:`roundpipe_fx.ir.joint_graph`) and plain data, never the runtime and never another pass.
"""
