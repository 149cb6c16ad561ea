"""The compiler for one device: runs the passes and the planner on a joint graph, emits programs, makes the plan."""
