"""Server-sent events of a completion stream, scanned without decoding each one. No network, no clock.

A load generator shares the machine with what it measures, so a frame costs one slice and one append here. Only the
first frames and the last few are ever decoded, after the stream has ended: in between lie tokens and nothing else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from shared.packing import NOT_DECODED

TAIL = 4
"""Frames kept from the end: last text, finish, usage, `[DONE]`."""
HEAD = 2
"""Frames kept from the start: a role, and the first text."""
MAX_EVENT_BYTES = 2**20


class StreamError(Exception):
    """The stream is not a valid completion stream; the text says why."""


class StreamSummary(NamedTuple):
    """The contents and times of a finished stream."""

    token_times: list[float]
    """When each token's frame arrived; of an answer without any text, when it ended."""
    prompt_tokens: int | None
    output_tokens: int
    """Output tokens according to the server's usage; without usage, the number of frames."""
    finish_reason: str | None
    cached_tokens: int | None = None
    """None where usage does not tell."""
    text: str = ""
    """The whole answer, where it was kept."""


class FrameScanner:
    """Owns one stream's frames and their arrival times."""

    def __init__(self, keep_text: bool = False) -> None:
        """`keep_text`: every frame is kept, and decoded at the end, for callers that need the answer."""
        self._all: list[bytes] | None = [] if keep_text else None
        self._times: list[float] = []
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque(maxlen=TAIL)
        self._partial = b""

    def feed(self, data: bytes, now: float) -> None:
        """Takes body bytes as they come, cut anywhere. Raises StreamError where a frame has no end."""
        if not self._partial and data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2:
            self._frame(data[:-2], now)  # one whole frame: nearly always
            return
        *whole, self._partial = (self._partial + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._partial) > MAX_EVENT_BYTES:
            raise StreamError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for frame in whole:
            self._frame(frame, now)

    def _frame(self, frame: bytes, now: float) -> None:
        if not frame.startswith(b"data:"):
            return  # a comment that keeps the connection alive
        self._times.append(now)
        self._tail.append(frame)
        if self._all is not None:
            self._all.append(frame)
        if len(self._head) < HEAD:
            self._head.append(frame)

    @property
    def unfinished(self) -> bytes:
        """What followed the last whole frame: all there is, where the response is no stream."""
        return self._partial

    def finish(self) -> StreamSummary:
        """What the stream tells, once it has ended. Raises StreamError where it broke off or carries an error."""
        count = len(self._times)
        tail = [_decoded(frame) for frame in self._tail]
        for event in tail:
            if isinstance(event, dict) and event.get("error"):
                raise StreamError(_error_text(event["error"]))
        if not tail or tail[-1] is not None:
            raise StreamError("the stream broke off before [DONE]")
        silent = {count - len(tail) + i for i, event in enumerate(tail) if not _carries_tokens(event)}
        opening = self._opening()
        # Servers name the role with the first token. Its text comes beside it, unless a parser of reasoning or calls
        # holds it back: then the role is all that says when the first token came, to vLLM's client, too.
        alone = opening is not None and self._times[opening : opening + 1] != self._times[opening + 1 : opening + 2]
        if opening is not None and not alone:
            silent.add(opening)
        times = [time for i, time in enumerate(self._times) if i not in silent]
        if len(times) == alone:
            times += self._end(tail)
        usage: dict[str, Any] = next((e["usage"] for e in reversed(tail) if e is not None and e.get("usage")), {})
        return StreamSummary(
            token_times=times,
            prompt_tokens=usage.get("prompt_tokens"),
            output_tokens=usage.get("completion_tokens", len(times)),
            finish_reason=next((r for e in reversed(tail) if (r := _finish_reason(e)) is not None), None),
            cached_tokens=_cached_tokens(usage),
            text="".join(_answer(_choice(_decoded(frame))) for frame in self._all or ()),
        )

    def _opening(self) -> int | None:
        """The place of the frame that names a chat's role, where it says nothing."""
        return next((i for i, frame in enumerate(self._head) if _is_opening(_decoded(frame))), None)

    def _end(self, tail: Sequence[dict[str, Any] | None]) -> list[float]:
        """When the answer ended, of one whose tokens gave no text, as that which stops at once; none that did not."""
        ended = (time for time, event in zip(self._times[-len(tail) :], tail, strict=True) if _finish_reason(event))
        return list(ended)[:1]


def _decoded(frame: bytes) -> dict[str, Any] | None:
    """The event of a frame; None for `[DONE]`."""
    data = frame[5:].strip()
    if data == b"[DONE]":
        return None
    try:
        event = msgspec.json.decode(data)
    except NOT_DECODED as error:
        raise StreamError(f"an event that is no JSON: {error}") from None
    if not isinstance(event, dict):
        raise StreamError("an event that is no JSON object")
    return event


def _choice(event: dict[str, Any] | None) -> dict[str, Any] | None:
    choices = (event or {}).get("choices")
    return choices[0] if choices else None


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice.get("text") or ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


def _answer(choice: dict[str, Any] | None) -> str:
    """What the next turn of a conversation repeats: not the reasoning."""
    if choice is None:
        return ""
    delta = choice.get("delta")
    return (choice.get("text") if delta is None else delta.get("content")) or ""


def _cached_tokens(usage: dict[str, Any]) -> int | None:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return cached if isinstance(cached, int) else None


def _carries_tokens(event: dict[str, Any] | None) -> bool:
    """Whether a late frame carries tokens: it holds text, or no end (a character may be incomplete)."""
    choice = _choice(event)
    return choice is not None and bool(_text(choice) or choice.get("finish_reason") is None)


def _is_opening(event: dict[str, Any] | None) -> bool:
    """A chat stream's first frame, which names the role and says nothing."""
    choice = _choice(event)
    return choice is not None and "role" in (choice.get("delta") or {}) and not _text(choice)


def _finish_reason(event: dict[str, Any] | None) -> str | None:
    return (_choice(event) or {}).get("finish_reason")


def _error_text(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
