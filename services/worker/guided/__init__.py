"""Guided decoding: what the output must match, compiled beside the steps and kept beside the sampler."""
