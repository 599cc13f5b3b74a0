"""How an engine finds out that what it computes is wrong, or late."""
