"""Unit tests of the tokenizer."""
