"""Queries, keys and values: in which matrices of a checkpoint they lie, and how a rank reads its own."""
