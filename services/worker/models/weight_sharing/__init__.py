"""Engines of one host that serve the same model have its packed weights in memory once (ADR 206)."""
