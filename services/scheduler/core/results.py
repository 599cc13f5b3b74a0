"""What a drawn token means for its sequence: kept, and whether it is the last. Knows no memory and no lines."""

from __future__ import annotations

from services.scheduler.core.sequence import Sequence
from shared.messages.detokenizer import NewTokens
from shared.messages.generation import FinishReason, TokenLogprobs
from shared.messages.scheduler import Sampled


def take(sequence: Sequence, sampled: Sampled) -> NewTokens:
    """Adds the token to `sequence`; the answer says so to the detokenizer, with `finish` where it was the last.

    Raises ValueError for more or fewer tokens than one: none of our plans asks for that.
    """
    (token,) = sampled.tokens
    sequence.learn(token)
    known = len(sequence.tokens)
    finish: FinishReason | None = None
    if token in sequence.stops and known > sequence.min_length:
        finish = "stop"
    elif known >= sequence.limit:
        finish = "length"
    return entry(sequence, sampled.tokens, finish, sampled.logprobs)


def entry(
    sequence: Sequence,
    tokens: tuple[int, ...],
    finish: FinishReason | None,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> NewTokens:
    """What the detokenizer hears of `tokens`, which `sequence` has learnt already."""
    generation = sequence.generation
    asked_to_stop = finish == "stop" and tokens[-1] in generation.stopping.stop_token_ids
    return NewTokens(
        generation.request,
        generation.attempt,
        sequence.produced - len(tokens),
        tokens,
        finish,
        tokens[-1] if asked_to_stop else None,
        logprobs,
    )
