"""Models that `transformers` builds: one at a time in a process, as `LLM` has an encoder's beside a worker's; and what
its errors say."""

import threading

BUILDING = threading.RLock()
"""Held by whoever has the library build a model: meanwhile it replaces functions of its own classes and PyTorch's
(`no_tie_weights`, `no_init_weights`). A model of another thread would go without them: one whose embeddings are tied
was said to have none. And two that overlap may leave them replaced for good."""


def first_line(error: Exception) -> str:
    """The first line of what it says, with the next one where that only follows; or its kind."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
