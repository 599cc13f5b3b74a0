"""Unit tests of `shared.journals`."""
