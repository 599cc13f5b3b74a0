"""Architectures whose Python code comes with their checkpoints, by the native decoder (ADR 216)."""
