"""Detokenizer."""
