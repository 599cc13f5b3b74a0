"""The two ways to answer: a stream of events as the tokens come, or one body at the end."""

from __future__ import annotations

import asyncio
from typing import Protocol

from services.gateway.answers.choice import ChoiceState
from services.gateway.answers.frames import DONE, KEEP_ALIVE, Frames, error_frame
from services.gateway.api.errors import ApiError
from shared.messages.gateway import Delta


class Writer(Protocol):
    """The client's connection, as far as a stream needs it."""

    def write_chunk(self, data: bytes) -> None: ...

    def unread(self) -> int: ...


class Whole:
    """Collects; the body is made when the exchange has ended."""

    def delta(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        if choice.speech is None:
            choice.pieces.append(delta.text)
        else:
            choice.speech.take(delta.text, delta.finish)
        choice.token_ids.extend(delta.tokens)
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        return True

    def completed(self, choices: list[ChoiceState], now: float) -> None:
        pass

    def failed(self, error: ApiError) -> None:
        pass

    def tick(self, now: float) -> None:
        pass


class Stream:
    """Owns what a stream has not written yet. Until the response is started frames wait in `_pending`; from then
    on each goes straight to the connection. The bound on what the client leaves unread is `unread_limit`."""

    def __init__(
        self, frames: Frames, writer: Writer, *, include_usage: bool, keep_alive: float, unread_limit: int, now: float
    ) -> None:
        self._frames, self._writer = frames, writer
        self._include_usage = include_usage
        self._keep_alive, self._unread_limit = keep_alive, unread_limit
        self._pending: list[bytes] | None = []
        self._written_at = now
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when there is something to write: time to start the response. Or there will be nothing."""

    def delta(self, choice: ChoiceState, delta: Delta, now: float) -> bool:
        if delta.logprobs:
            choice.logprobs.extend(delta.logprobs)
        if self._frames.tells_ids:
            choice.token_ids.extend(delta.tokens)
        if not delta.text and delta.finish is None:
            return True  # half a character, or perhaps the beginning of a stop string
        if choice.speech is not None:
            said = choice.speech.take(delta.text, delta.finish)
            if not said and delta.finish is None:
                return True  # perhaps the beginning of a mark
            frame = (b"" if choice.begun else self._frames.role(choice)) + self._frames.parts(choice, said)
            choice.begun = True
        elif choice.begun:
            frame = self._frames.text(choice, delta.text)
        else:
            choice.begun, choice.offset = True, len(choice.echo)
            frame = self._frames.role(choice) + self._frames.text(choice, choice.echo + delta.text)
        self._write(frame)
        self._written_at = now
        return self._writer.unread() <= self._unread_limit

    def completed(self, choices: list[ChoiceState], now: float) -> None:
        self._write(self._frames.usage(choices) + DONE if self._include_usage else DONE)

    def failed(self, error: ApiError) -> None:
        """Before the response has started it can still be an error response; later the error is an event."""
        if self._pending is None:
            self._write(error_frame(error) + DONE)

    def tick(self, now: float) -> None:
        if now - self._written_at >= self._keep_alive:
            self._written_at = now
            self._write(KEEP_ALIVE)

    def _write(self, data: bytes) -> None:
        if self._pending is None:
            self._writer.write_chunk(data)
        else:
            self._pending.append(data)
            self.wake()

    def wake(self) -> None:
        if not self.first.done():
            self.first.set_result(None)

    @property
    def waiting(self) -> bool:
        """Whether frames wait for the response to be started."""
        return bool(self._pending)

    def start(self) -> None:
        """The response has been started: write what waits."""
        waiting, self._pending = self._pending, None
        if waiting:
            self._writer.write_chunk(b"".join(waiting))
