"""Unit tests of `kvstore.node`."""
