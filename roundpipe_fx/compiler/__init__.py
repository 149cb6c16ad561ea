"""The compiler for one device: runs the passes on a joint graph, emits programs, makes the plan."""
