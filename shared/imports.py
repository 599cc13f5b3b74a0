"""Imports of libraries that import more than is needed of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without(module: str) -> Iterator[None]:
    """What is imported inside finds no such module installed, unless it has been imported before."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]  # Python's own way to say that an import shall fail
    try:
        yield
    finally:
        del sys.modules[module]
