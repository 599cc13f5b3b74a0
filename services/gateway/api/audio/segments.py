"""What was said in a window, in segments with their times: out of an answer's tokens, of which some are times."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shared.messages.gateway import PositionLogprobs
from shared.messages.model_card import AudioModel


class SpokenSegment(NamedTuple):
    """A part of what was said."""

    start: float
    """Seconds from the beginning of the sound."""
    end: float
    text: str
    tokens: tuple[int, ...]
    """Its text's."""
    avg_logprob: float
    no_speech_prob: float
    """That nobody speaks in its window."""
    temperature: float

    @property
    def compression_ratio(self) -> float:
        """Bytes of the text by those that zlib makes of it: much where it repeats itself."""
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw))

    def body(self, number: int) -> dict[str, Any]:
        """As OpenAI shows it."""
        return {
            "id": number,
            "seek": round(self.start * 100),
            "start": round(self.start, 2),
            "end": round(self.end, 2),
            "text": self.text,
            "tokens": self.tokens,
            "temperature": self.temperature,
            "avg_logprob": self.avg_logprob,
            "compression_ratio": self.compression_ratio,
            "no_speech_prob": self.no_speech_prob,
        }


class WindowTimes(NamedTuple):
    """Where a window lies in its sound, in seconds."""

    start: float
    seconds: float


def segments_of(
    drawn: Sequence[PositionLogprobs], audio: AudioModel, times: WindowTimes, no_speech: float, temperature: float
) -> Iterable[SpokenSegment]:
    """Yields the segments of an answer that has times: text between two of these, or before the first one, or behind
    the last one, where the window ends. Text without letters is none."""
    first_time = audio.no_timestamps + 1
    begun, held = 0.0, list[PositionLogprobs]()

    def closed(end: float) -> Iterable[SpokenSegment]:
        text = b"".join(each.chosen.raw for each in held).decode(errors="replace")
        if text.strip():
            yield SpokenSegment(
                start=times.start + min(begun, times.seconds),
                end=times.start + min(max(begun, end), times.seconds),
                text=text,
                tokens=tuple(each.chosen.token_id for each in held),
                avg_logprob=math.fsum(each.chosen.logprob for each in held) / len(held),
                no_speech_prob=no_speech,
                temperature=temperature,
            )

    for each in drawn:
        token = each.chosen.token_id
        if token >= first_time:
            moment = (token - first_time) * audio.timestamp_s
            yield from closed(moment)
            begun, held = moment, []
        elif token < audio.end:
            held.append(each)
    yield from closed(times.seconds)
