"""Where values die: after their last use, emitted code lets go of them."""

from __future__ import annotations

from torch import fx


def find_last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values whose last use it is; a value without uses dies at its own node."""
    dying: dict[fx.Node, list[fx.Node]] = {node: [] for node in graph.nodes}
    seen: set[fx.Node] = set()
    # From the end: the first reader that is met is the last one to run.
    for node in reversed(graph.nodes):
        if node.op == "placeholder":
            continue
        for value in node.all_input_nodes:
            if value not in seen:
                seen.add(value)
                dying[node].append(value)
        # What nobody reads dies where it is made.
        if node.op != "output" and not node.users:
            dying[node].append(node)
    return dying
