"""Attention over compressed keys (DeepSeek-V4): its weights, its cache, and what it computes."""
