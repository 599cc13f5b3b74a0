"""How a prompt is refused: always naming the client's own field, never with a traceback."""

from __future__ import annotations


class PromptRefused(Exception):
    """The prompt is at fault: `field` names the client's field, the text says what is wrong and what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message
