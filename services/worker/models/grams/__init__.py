"""Embeddings of n-grams that layers add to several streams."""
