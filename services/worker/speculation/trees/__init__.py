"""Trees of drafts: several tokens for a position, of which at most one is accepted."""
