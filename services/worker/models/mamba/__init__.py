"""Models whose layers, or some of them, are state-space ones (Mamba-2)."""
