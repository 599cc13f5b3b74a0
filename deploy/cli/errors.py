"""How a command fails: one clear line on standard error, and a status; never a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """What was asked cannot be done. The text is all that the user sees."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status
