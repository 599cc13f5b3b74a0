"""Imports what a worker needs, for processes that are forked afterwards. Touches no device and starts no thread."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import services.worker.actor  # noqa: F401 what `__main__` imports
from services.worker.config import WorkerConfig
from shared.config import load_config


def preload(flags: Sequence[str]) -> None:
    """Imports all that a worker with these flags will. Raises ConfigError, ImportError."""
    config = load_config("worker", WorkerConfig, flags)
    with suppress(ImportError):
        import uvloop  # noqa: F401
    if config.device == "sim":
        import services.worker.sim.backend
    else:
        import services.worker.executor.torch_backend  # noqa: F401
