"""The ranks of an engine: who holds what, how they exchange tensors, and which processors they run on."""
