"""Unit tests of `shared.bus`."""
