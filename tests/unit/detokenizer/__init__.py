"""Unit tests of the detokenizer."""
