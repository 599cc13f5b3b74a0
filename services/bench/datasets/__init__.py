"""Prompts to load a server with: of exact lengths, and the same for the same seed."""
