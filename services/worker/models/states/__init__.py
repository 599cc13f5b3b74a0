"""Models whose layers, or some of them, keep a state of a sequence in place of keys and values."""
