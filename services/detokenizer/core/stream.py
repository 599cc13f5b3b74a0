"""One request's output on its way to text: its tokens in, the new text of each out."""

from __future__ import annotations

from typing import NamedTuple

from services.detokenizer.core.stop_strings import StopHit, StopScan
from services.detokenizer.core.text import TextVocabulary, TokenSpelling
from shared.ids import EngineId
from shared.messages.detokenizer import NewTokens, OpenStream, PromptLogprobs
from shared.messages.gateway import Delta, LogprobText, PositionLogprobs, PromptLogprobsDelta
from shared.messages.generation import FinishReason, TokenLogprobs
from shared.packing import unpack


class StreamUpdate(NamedTuple):
    """The result of feeding new tokens to a stream."""

    delta: Delta
    stopped: bool
    """Whether a stop string ended the request here, and its engine does not know it yet."""


class RequestStream:
    """Owns one output: its undecided bytes, its place in the stop strings, and how many tokens there were."""

    __slots__ = ("_scan", "_sent", "_text", "_vocabulary", "awaited", "engine", "opened", "position")

    def __init__(self, opened: OpenStream, engine: EngineId, vocabulary: TextVocabulary) -> None:
        self.opened = opened
        self.engine = engine
        self.awaited = False
        """Whether no tokens have arrived yet from `engine`, to which it has moved."""
        self._vocabulary = vocabulary
        self._scan = StopScan(opened.stop, include=opened.include_stop) if any(opened.stop) else None
        self._sent = opened.sent_chars
        """Characters that the client has from earlier attempts and that are still to come once more."""
        self.position = 0
        """Output tokens so far, those of earlier attempts included."""
        context = unpack(opened.context)
        prompt = context[: len(context) - opened.resumed]
        self._text = vocabulary.open(
            prompt,
            begins=len(prompt) >= opened.prompt_tokens,
            skip_special_tokens=opened.skip_special_tokens,
            keep_markup=opened.keep_markup,
        )

    def move(self, engine: EngineId) -> None:
        """Its next tokens come from `engine`."""
        self.engine = engine
        self.awaited = True

    def replay(self) -> StreamUpdate | None:
        """Runs over the output of earlier attempts, once, before new tokens, where there was some (`opened.resumed`).
        None where the client has all of its text and it has not ended."""
        resumed = self.opened.resumed
        tokens = tuple(unpack(self.opened.context)[-resumed:])
        text, _, stop = self._run(tokens)
        self.position = resumed
        delta = self._delta(resumed, (), text, None if stop is None else "stop", stop, None)
        return StreamUpdate(delta, stopped=stop is not None) if stop is not None or delta.text else None

    def add_tokens(self, entry: NewTokens) -> StreamUpdate:
        """New output tokens as a delta; its `finish` is set where the output ends with them, by the engine or by a stop
        string. `entry.position` must be `position`."""
        self.awaited = False
        tokens, shown = entry.tokens, entry.tokens
        if entry.finish == "stop" and not self.opened.include_stop:
            shown = tokens[:-1]
        start = self.position
        text, used, stop = self._run(shown)
        if stop is not None:
            tokens = tokens[:used]
        elif entry.finish is not None:
            rest, stop = self._end(start + len(shown))
            text += rest
        self.position = start + len(tokens)
        reason = stop if stop is not None else entry.stop_token
        finish: FinishReason | None = "stop" if stop is not None else entry.finish
        delta = self._delta(start, tokens, text, finish, reason, entry.logprobs)
        return StreamUpdate(delta, stopped=stop is not None and entry.finish is None)

    def spell_prompt(self, prompt: PromptLogprobs) -> PromptLogprobsDelta:
        """Log-probabilities of a part of the prompt, with the text of each token."""
        spelled = tuple(map(self._spell, prompt.logprobs))
        return PromptLogprobsDelta(prompt.request, prompt.attempt, prompt.position, spelled)

    def _run(self, tokens: tuple[int, ...]) -> tuple[str, int, str | None]:
        """Text of `tokens`; how many of them there are up to a stop string's end; the stop string."""
        push = self._text.push
        scan = self._scan
        if scan is None:
            if len(tokens) == 1:
                return push(tokens[0]), 1, None
            return "".join([push(token) for token in tokens]), len(tokens), None
        text = ""
        for used, token in enumerate(tokens, start=1):
            fed = scan.feed(push(token), armed=self.position + used > self.opened.min_tokens)
            if isinstance(fed, StopHit):
                return text + fed.text, used, fed.stop
            text += fed
        return text, len(tokens), None

    def _end(self, count: int) -> tuple[str, str | None]:
        """Returns the text that was undecided or held back, at the end of the stream."""
        flushed = self._text.flush()
        if self._scan is None:
            return flushed, None
        fed = self._scan.feed(flushed, armed=count > self.opened.min_tokens)
        if isinstance(fed, StopHit):
            return fed.text, fed.stop
        return fed + self._scan.rest(), None

    def _delta(
        self,
        position: int,
        tokens: tuple[int, ...],
        text: str,
        finish: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: tuple[TokenLogprobs, ...] | None,
    ) -> Delta:
        if self._sent:
            dropped = min(self._sent, len(text))
            self._sent -= dropped
            text = text[dropped:]
        spelled = None if logprobs is None else tuple(map(self._spell, logprobs[: len(tokens)]))
        opened = self.opened
        return Delta(opened.request, opened.attempt, position, tokens, text, finish, stop_reason, spelled)

    def _spell(self, logprobs: TokenLogprobs) -> PositionLogprobs:
        spelling = self._vocabulary.spelling
        return PositionLogprobs(
            _logprob_text(spelling(logprobs.token), logprobs.logprob, logprobs.token),
            tuple(_logprob_text(spelling(token), logprob, token) for token, logprob in logprobs.top),
            logprobs.rank,
        )


def _logprob_text(spelling: TokenSpelling, logprob: float, token: int) -> LogprobText:
    return LogprobText(spelling.text, spelling.raw, logprob, token)
