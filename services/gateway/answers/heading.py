"""What every body and every chunk of an answer begins with."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

FINGERPRINT = "baton"
"""`system_fingerprint`: changes where the same seed would no longer give the same text."""


class Heading(NamedTuple):
    kind: Literal["chat", "completion"]
    id: str
    created: int
    """Unix seconds."""
    model: str

    def fields(self, *, chunk: bool) -> dict[str, Any]:
        chat = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": self.id,
            "object": chat if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }
