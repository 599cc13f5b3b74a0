"""That `transformers` builds one model at a time in a process, as `LLM` has an encoder's beside a worker's."""

import threading

BUILDING = threading.RLock()
"""Held by whoever has the library build a model: meanwhile it replaces functions of its own classes and PyTorch's
(`no_tie_weights`, `no_init_weights`). A model of another thread would go without them: one whose embeddings are tied
was said to have none. And two that overlap may leave them replaced for good."""
