"""The runtime: runs emitted programs. It does not depend on the passes that emitted them."""
