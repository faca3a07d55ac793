"""Weights that a trainer has in memory, sharded over its ranks, on their way into servers."""
