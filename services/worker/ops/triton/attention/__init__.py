"""Attention over the paged cache: decodes, prefills, and the shapes of their tiles."""
