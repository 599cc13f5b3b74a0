"""Triton kernels, a module for each family: pure functions of tensors. Imported lazily, only where a GPU computes."""

from importlib.util import find_spec

if find_spec("triton") is not None:
    from triton import knobs

    if hasattr(knobs.language, "default_fp_fusion"):
        # Multiply and add in one instruction: Triton 3.9 warns where nobody says whether, 3.10 will not by itself.
        knobs.language.default_fp_fusion = True
