"""Imports what such a process needs, for processes that are forked afterwards; beside it, what its worker does."""

from __future__ import annotations

from collections.abc import Sequence

from services.coordinator.__main__ import build as build_coordinator  # noqa: F401 what `__main__` imports
from services.detokenizer.__main__ import build as build_detokenizer  # noqa: F401
from services.scheduler.__main__ import build as build_scheduler  # noqa: F401
from services.worker.preload import preload as preload_worker


def preload(flags: Sequence[str]) -> None:
    """`flags`: the worker's. Raises ConfigError, ImportError."""
    preload_worker(flags)
