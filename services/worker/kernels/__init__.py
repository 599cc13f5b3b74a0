"""Triton kernels, a module for each family: pure functions of tensors. Imported lazily, only where a GPU computes."""
