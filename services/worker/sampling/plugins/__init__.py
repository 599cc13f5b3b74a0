"""Logits processors that installed packages bring (docs/plugins.md): their interface, which is that of vLLM V1's custom
ones, and how they are run for the requests that ask for them, and kept from harming any other.
"""
