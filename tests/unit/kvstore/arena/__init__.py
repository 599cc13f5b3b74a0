"""Unit tests of `kvstore.arena`."""
