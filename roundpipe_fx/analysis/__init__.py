"""What can be said about a graph or a program without changing it: liveness, memory, costs, host synchronizations."""
