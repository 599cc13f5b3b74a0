"""Unit tests of what a coordinator decides."""
