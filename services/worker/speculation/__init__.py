"""Speculative decoding: methods that draft tokens, and how drafts are verified. Output does not depend on drafts."""
