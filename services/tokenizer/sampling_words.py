"""Sampling parameters that clients give as text, as the token ids that a worker knows."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from services.tokenizer.refusal import PromptRefused
from services.tokenizer.thinking import LOOKED_AT, thinking_at
from services.tokenizer.vocabulary import Vocabulary
from shared.dialects import THINKING_MARKS, Dialect, Thinking
from shared.messages.generation import SamplingParams
from shared.messages.tokenizer import Tokenize

MOST_WORD_TOKENS = 64
"""Of one bad word: workers keep all of them in arrays of equal rows."""


def translated(
    message: Tokenize, vocabulary: Vocabulary, dialect: Dialect, thinking: Thinking | None, prompt: list[int]
) -> SamplingParams:
    """The request's parameters; `thinking` and `prompt` tell where its thoughts stand. Raises PromptRefused."""
    sampling = message.sampling
    if message.bad_words:
        words = tuple(spelling for word in message.bad_words for spelling in _spellings(word, vocabulary))
        sampling = replace(sampling, bad_words=words)
    if sampling.thinking_budget is not None:
        if thinking is None:
            thinking = thinking_at(vocabulary.decode(prompt[-LOOKED_AT:], skip_special_tokens=False))
        sampling = _bounded_thinking(message, sampling, vocabulary, dialect, thinking)
    return sampling


def _spellings(word: str, vocabulary: Vocabulary) -> Iterator[tuple[int, ...]]:
    """The word at the beginning of a text, and in the middle of one, unless that is a mere space before the same
    tokens. vLLM leaves the latter out where it has another number of tokens: there `the` may be banned, and ` the` not.
    """
    plain = _encoded(word.lstrip(), vocabulary, "bad_words")
    yield plain
    spaced = _encoded(" " + word.lstrip(), vocabulary, "bad_words")
    if spaced[-len(plain) :] != plain:
        yield spaced


def _encoded(text: str, vocabulary: Vocabulary, field: str) -> tuple[int, ...]:
    ids = tuple(vocabulary.encode(text, add_special_tokens=False, field=field))
    if len(ids) > MOST_WORD_TOKENS:
        raise PromptRefused(field, f"{field}: {text[:80]!r} makes {len(ids)} tokens; at most {MOST_WORD_TOKENS}")
    return ids


def _bounded_thinking(
    message: Tokenize, sampling: SamplingParams, vocabulary: Vocabulary, dialect: Dialect, thinking: Thinking | None
) -> SamplingParams:
    """With the marks of thoughts; without a budget where the prompt has closed them already."""
    marks = None if dialect.reasoning is None else THINKING_MARKS[dialect.reasoning]
    end = message.thinking_end or (marks.end if marks is not None else "")
    if not end:
        raise PromptRefused(
            "thinking_token_budget", "thinking_token_budget: this model's chat template knows no thoughts"
        )
    if thinking == "closed":
        return replace(sampling, thinking_budget=None)
    # Nothing shows whether it will think: only what the output itself begins is bounded.
    begins = marks is not None and thinking is None and dialect.reasoning != "deepseek_r1"
    start = _encoded(marks.start, vocabulary, "thinking_token_budget") if begins and marks is not None else ()
    return replace(sampling, thinking_end=_encoded(end, vocabulary, "thinking_token_budget"), thinking_start=start)
