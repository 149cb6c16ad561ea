"""Batches: how they are split into microbatches, and outputs put together."""
