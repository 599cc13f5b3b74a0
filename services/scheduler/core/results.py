"""What drawn tokens mean for their sequence: kept, and whether one is the last. Knows no memory and no lines."""

from __future__ import annotations

from services.scheduler.core.sequence import Sequence
from shared.messages.detokenizer import NewTokens
from shared.messages.generation import FinishReason, TokenLogprobs
from shared.messages.scheduler import Sampled


def take(sequence: Sequence, sampled: Sampled) -> NewTokens:
    """Adds the tokens to `sequence`; the answer says so to the detokenizer, with `finish` where the last is among them.
    What a step has yielded behind that one is dropped."""
    tokens, logprobs = sampled.tokens, sampled.logprobs
    if len(tokens) == 1:
        return entry(sequence, tokens, sequence.learn(tokens[0]), logprobs)
    for kept, token in enumerate(tokens, 1):
        finish = sequence.learn(token)
        if finish is not None:
            tokens, logprobs = tokens[:kept], logprobs and logprobs[:kept]
            break
    return entry(sequence, tokens, finish, logprobs)


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
