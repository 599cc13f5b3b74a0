"""Unit tests of `kvstore.transfer`."""
