"""Triton kernels, a module for each family: pure functions of tensors. Imported lazily, only where a GPU computes."""

from triton import knobs

if hasattr(knobs.language, "default_fp_fusion"):
    # Multiplications and additions in one instruction. Triton 3.9 warns where nobody says whether, 3.10 will not fuse.
    knobs.language.default_fp_fusion = True
