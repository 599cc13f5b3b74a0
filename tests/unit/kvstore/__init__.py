"""Unit tests of `kvstore`."""
