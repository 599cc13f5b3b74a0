"""Rows of a step shared by ranks that have all weights each."""
