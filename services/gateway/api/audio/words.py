"""The words of a window with their times: tokens joined as `transformers` joins them (`_combine_tokens_into_words`)."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from services.gateway.api.audio.segments import WindowTimes
from shared.messages.gateway import PositionLogprobs
from shared.messages.model_card import AudioModel

_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words are not told apart: each of their characters is one."""
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BEFORE_A_WORD = "\"'“¡¿([{-"
_BEHIND_A_WORD = "\"'.。,，!！?？:：”)]}、"


class SpokenWord(NamedTuple):
    """A word with its punctuation."""

    text: str
    start: float
    """Seconds from the beginning of the sound."""
    end: float

    def body(self) -> dict[str, Any]:
        """As OpenAI shows it."""
        return {"word": self.text.strip(), "start": round(self.start, 2), "end": round(self.end, 2)}

    def and_then(self, other: SpokenWord) -> SpokenWord:
        """Both as one."""
        return SpokenWord(self.text + other.text, self.start, other.end)


def words_of(
    drawn: Sequence[PositionLogprobs], ends: Sequence[float], audio: AudioModel, times: WindowTimes, language: str
) -> Iterable[SpokenWord]:
    """Yields the words of an answer that has times, none across one of these. `ends`: of its tokens but its end, in
    seconds from the window's start; a token begins where the one before it ends."""
    begun, held = 0.0, list[tuple[bytes, float, float]]()
    spoken = [each for each in drawn if each.chosen.token_id != audio.end]
    for each, end in zip(spoken, ends, strict=True):
        if each.chosen.token_id > audio.no_timestamps:
            yield from _words(held, times, language)
            held = []
        elif each.chosen.token_id < audio.end:
            held.append((each.chosen.raw, begun, end))
        begun = end
    yield from _words(held, times, language)


def _words(tokens: list[tuple[bytes, float, float]], times: WindowTimes, language: str) -> Iterable[SpokenWord]:
    words = list(_characters(tokens))
    if language not in _WITHOUT_SPACES:
        words = _joined_at_spaces(words)
    for word in _with_punctuation(words):
        if word.text.strip():
            start, end = min(word.start, times.seconds), min(max(word.start, word.end), times.seconds)
            yield SpokenWord(word.text, times.start + start, times.start + end)


def _characters(tokens: list[tuple[bytes, float, float]]) -> Iterable[SpokenWord]:
    """Tokens, but those together that have parts of one character."""
    decoder, text, begun = codecs.getincrementaldecoder("utf-8")("replace"), "", None
    for number, (raw, start, end) in enumerate(tokens):
        text += decoder.decode(raw, final=number + 1 == len(tokens))
        begun = start if begun is None else begun
        if not decoder.getstate()[0]:
            yield SpokenWord(text, begun, end)
            text, begun = "", None


def _joined_at_spaces(pieces: list[SpokenWord]) -> list[SpokenWord]:
    words: list[SpokenWord] = []
    for piece in pieces:
        if not words or piece.text.startswith(" ") or piece.text.strip() in _PUNCTUATION:
            words.append(piece)
        else:
            words[-1] = words[-1].and_then(piece)
    return words


def _with_punctuation(words: list[SpokenWord]) -> list[SpokenWord]:
    """What stands before a word, or behind it, is of the word."""
    behind: list[SpokenWord] = []  # from the last to the first
    for word in reversed(words):
        if behind and word.text.startswith(" ") and word.text.strip() in _BEFORE_A_WORD:
            behind[-1] = word.and_then(behind[-1])
        else:
            behind.append(word)
    joined: list[SpokenWord] = []
    for word in reversed(behind):
        if joined and not joined[-1].text.endswith(" ") and word.text in _BEHIND_A_WORD:
            joined[-1] = joined[-1].and_then(word)
        else:
            joined.append(word)
    return joined
