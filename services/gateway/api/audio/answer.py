"""The shapes in which what was said is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from services.gateway.api.audio.request import AudioRequest
from services.gateway.api.audio.segments import SpokenSegment
from services.gateway.api.audio.words import SpokenWord

_PLAIN = b"text/plain; charset=utf-8"


class Transcript(NamedTuple):
    """All that was said in a recording."""

    seconds: float
    """Of the sound."""
    language: str
    """The code of what is spoken."""
    text: str
    segments: Sequence[SpokenSegment] = ()
    """Where times are asked for."""
    words: Sequence[SpokenWord] = ()
    """Where times of words are asked for."""


def answer_body(request: AudioRequest, transcript: Transcript) -> tuple[bytes, bytes]:
    """The body and its content type."""
    match request.format:
        case "json":
            return msgspec.json.encode(
                {"text": transcript.text, "usage": usage(transcript.seconds)}
            ), b"application/json"
        case "verbose_json":
            return msgspec.json.encode(_verbose(request, transcript)), b"application/json"
        case "text":
            return f"{transcript.text}\n".encode(), _PLAIN
        case "srt":
            return _srt(transcript.segments).encode(), _PLAIN
        case "vtt":
            return _vtt(transcript.segments).encode(), b"text/vtt; charset=utf-8"


def delta_event(text: str) -> dict[str, Any]:
    """New text of a stream."""
    return {"type": "transcript.text.delta", "delta": text}


def done_event(transcript: Transcript) -> dict[str, Any]:
    """The last event of a stream."""
    return {"type": "transcript.text.done", "text": transcript.text, "usage": usage(transcript.seconds)}


def usage(seconds: float) -> dict[str, Any]:
    """By the second, as OpenAI bills it."""
    return {"type": "duration", "seconds": -int(-seconds // 1)}


def _verbose(request: AudioRequest, transcript: Transcript) -> dict[str, Any]:
    body: dict[str, Any] = {
        "task": request.task,
        "language": transcript.language,
        "duration": round(transcript.seconds, 3),
        "text": transcript.text,
    }
    if "segment" in request.granularities:
        body["segments"] = [each.body(number) for number, each in enumerate(transcript.segments)]
    if "word" in request.granularities:
        body["words"] = [each.body() for each in transcript.words]
    return {**body, "usage": usage(transcript.seconds)}


def _srt(segments: Sequence[SpokenSegment]) -> str:
    return "".join(
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def _vtt(segments: Sequence[SpokenSegment]) -> str:
    cues = (f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: SpokenSegment) -> str:
    """Without what would end a cue, or look like one's times."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"
