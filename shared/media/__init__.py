"""Rows of images beside the bus: files in shared memory, and pieces of them for who shares no memory (ADR 100)."""
