"""Speculative decoding: whoever drafts tokens, and how drafts are verified. The model's distribution never changes."""
