"""Models that `transformers` computes: its modules, our paged attention, batching and cache."""
