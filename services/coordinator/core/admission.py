"""Whether a request fits the model's context, in the words that clients of vLLM know."""

from __future__ import annotations

from shared.messages.gateway import Rejected
from shared.messages.generation import Generation
from shared.messages.lifecycle import ModelCard


def fits(generation: Generation, max_model_len: int) -> bool:
    """Whether prompt and the tokens asked for (one at least) go into the context."""
    return generation.prompt_length + max(generation.stopping.max_tokens or 1, 1) <= max_model_len


def refusal(generation: Generation, card: ModelCard) -> Rejected | None:
    """The rejection of a request that the model's context cannot hold; None where it fits.

    Resumed tokens count as output, so that every attempt is judged alike. The field is `messages` because only
    the gateway knows whether the client sent `messages` or `prompt`; it may put its own.
    """
    if fits(generation, card.max_model_len):
        return None
    length, wanted = generation.prompt_length, generation.stopping.max_tokens
    context = f"This model's maximum context length is {card.max_model_len} tokens"
    if length >= card.max_model_len or wanted is None:
        field = "messages"
        message = (
            f"{context}. However, your request has {length} input tokens, and the output needs one at least. "
            "Please reduce the length of the input."
        )
    else:
        field = "max_tokens"
        message = (
            f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. {context} and your request has "
            f"{length} input tokens ({wanted} > {card.max_model_len} - {length})."
        )
    return Rejected(
        request=generation.request,
        attempt=generation.attempt,
        kind="invalid_request",
        message=message,
        field=field,
        code="context_length_exceeded",
    )
