"""Unit tests of `kvstore.core`."""
