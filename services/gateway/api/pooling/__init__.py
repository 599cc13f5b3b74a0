"""Requests that make vectors of prompts: embeddings, labels, scores."""
