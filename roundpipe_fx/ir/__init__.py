"""The joint graph and plain data about it, which every layer above reads."""
