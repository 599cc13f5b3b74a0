"""Sounds of requests: what decodes them, and what has them written down window by window."""
