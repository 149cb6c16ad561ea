"""The joint graph and plain data about it, on which all other layers depend."""
