"""Unit tests of `shared`."""
