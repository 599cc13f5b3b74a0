"""How a prompt is refused: always naming the client's own field, never with a traceback."""

from __future__ import annotations

from typing import Literal


class PromptRefused(Exception):
    """The prompt is at fault: `field` names the client's field, the text says what is wrong and what is allowed; `code`
    is OpenAI's, for a prompt that is too long."""

    def __init__(self, field: str, message: str, code: Literal["context_length_exceeded"] | None = None) -> None:
        super().__init__(message)
        self.field, self.message, self.code = field, message, code
