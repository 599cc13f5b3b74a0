"""Decoders with several residual streams (DeepSeek-V4): how they are mixed, and the pass over their layers."""
