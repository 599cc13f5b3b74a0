"""What was said so far, and the answer to what is said next. No terminal."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.cli.gateway_client import served_models, stream_chat
from deploy.cli.running_stack import running_stack
from deploy.errors import CommandError


@dataclass(slots=True)
class Chat:
    """Owns the conversation so far."""

    url: str
    key: str | None
    model: str
    settings: dict[str, Any]
    """Fields of each request beside model and messages."""
    system: str | None = None
    history: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def with_server(
        cls,
        url: str | None,
        key: str | None,
        model: str | None,
        name: str,
        run_dir: Path | None,
        system: str | None,
        settings: Mapping[str, Any],
    ) -> Chat:
        """With the running stack, or with any server at `url`. Raises CommandError."""
        given = {setting: value for setting, value in settings.items() if value is not None}
        if url is None:
            state = running_stack(name, run_dir)
            return cls(state.url, key or state.api_key, model or state.model, given, system)
        url = url.rstrip("/").removesuffix("/v1")
        if model is None:
            offered = served_models(url, key)
            if not offered:
                raise CommandError(f"{url} serves no model")
            model = offered[0]
        return cls(url, key, model, given, system)

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer, piece by piece; what has arrived of it, if anything has, is kept in the history."""
        message = {"role": "user", "content": question}
        body = {"model": self.model, "messages": [*self.messages(), message], **self.settings}
        answer: list[str] = []
        try:
            for piece in stream_chat(self.url, self.key, body):
                answer.append(piece)
                yield piece
        finally:
            if answer:
                self.history += [message, {"role": "assistant", "content": "".join(answer)}]

    def messages(self) -> list[dict[str, str]]:
        """As a request has them: the system prompt, if there is one, then all that was said."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history]

    def undo(self) -> str | None:
        """Takes back the last question and its answer; returns the question, or None where there was none."""
        if not self.history:
            return None
        self.history, (question, _) = self.history[:-2], self.history[-2:]
        return question["content"]

    def set(self, name: str, text: str) -> None:
        """Sets a field of further requests, from JSON or plain text; an empty text takes it out."""
        if not text:
            self.settings.pop(name, None)
            return
        try:
            self.settings[name] = json.loads(text)
        except ValueError:
            self.settings[name] = text

    def save(self, path: Path) -> None:
        """Writes all messages as JSON. Raises CommandError."""
        try:
            path.write_text(json.dumps(self.messages(), ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from None
