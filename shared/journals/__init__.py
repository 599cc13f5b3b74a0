"""Recorded messages and decisions, written to a file that can be read to its last whole record."""
