"""How a command fails: one clear line on standard error, and a status; never a traceback."""

from __future__ import annotations


class CommandError(Exception):
    """The command cannot be executed. The text is all that the user sees."""

    def __init__(self, text: str, status: int = 1) -> None:
        super().__init__(text)
        self.status = status
