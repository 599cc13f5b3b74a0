"""What drawn tokens mean for their sequence: kept, and whether one is the last. Knows no memory and no lines."""

from __future__ import annotations

from services.scheduler.core.sequence import Sequence
from shared.messages.detokenizer import NewTokens
from shared.messages.generation import FinishReason, TokenLogprobs
from shared.messages.scheduler import Sampled


def take(sequence: Sequence, sampled: Sampled) -> NewTokens:
    """Adds the tokens to `sequence`; the answer says so to the detokenizer, with `finish` where the last is among them.
    What a step has yielded behind that one is dropped."""
    kept = 0
    finish: FinishReason | None = None
    for token in sampled.tokens:
        sequence.learn(token)
        kept += 1
        finish = _finish(sequence, token)
        if finish is not None:
            break
    logprobs = None if sampled.logprobs is None else sampled.logprobs[:kept]
    return entry(sequence, sampled.tokens[:kept], finish, logprobs)


def _finish(sequence: Sequence, token: int) -> FinishReason | None:
    """How `sequence` ends with `token`, if it does."""
    known = len(sequence.tokens)
    if token in sequence.stops and known > sequence.min_length:
        return "stop"
    return "length" if known >= sequence.limit else None


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
