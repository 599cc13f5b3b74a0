"""How offline generation fails."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """A prompt or a parameter cannot be served. The text names the field, its value, and what is allowed."""

    def __init__(self, text: str, field: str | None = None) -> None:
        super().__init__(text)
        self.field = field


class EngineFailed(RuntimeError):
    """The model cannot be loaded, or the engine ended. The text says why."""
