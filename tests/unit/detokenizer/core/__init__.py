"""Unit tests of how tokens become text."""
