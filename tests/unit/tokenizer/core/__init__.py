"""Unit tests of how prompts become tokens."""
