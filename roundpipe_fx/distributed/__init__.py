"""Pipelines over processes: what a rank sends, receives, owns and agrees on with the others."""
