"""How a grammar is turned down."""

from __future__ import annotations


class GrammarRefused(Exception):
    """It cannot be compiled; the text says why and where, and the client reads it."""
