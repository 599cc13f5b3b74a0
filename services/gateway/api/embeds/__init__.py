"""Prompts that are given as embeddings."""
