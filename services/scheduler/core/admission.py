"""Whether a request can be served at all, and how long it may get. Never left waiting for what cannot come."""

from __future__ import annotations

import math
from typing import Literal

from services.scheduler.core.limits import Policy
from services.scheduler.core.sequence import Rank, Sequence
from shared.blocks import BLOCK_SIZE, HASH_BYTES
from shared.messages.gateway import Rejected
from shared.messages.generation import Generation
from shared.messages.lifecycle import ModelCard
from shared.messages.scheduler import Generate
from shared.tokens import TOKEN_BYTES, unpack


class _Refusal(Exception):
    def __init__(self, field: str | None, message: str, code: Literal["context_length_exceeded"] | None = None) -> None:
        super().__init__(message)
        self.field, self.message, self.code = field, message, code


class Admission:
    """Knows one model on one engine's memory; holds no state of requests."""

    def __init__(self, card: ModelCard, num_blocks: int, policy: Policy) -> None:
        self._card = card
        self._policy = policy
        self.context = min(card.max_model_len, num_blocks * BLOCK_SIZE)
        """Tokens that a sequence may reach: the model's context, or all of KV memory where that is less."""
        self._bound = (
            f"this model's maximum context length is {card.max_model_len} tokens"
            if self.context == card.max_model_len
            else f"this engine's KV memory holds {self.context} tokens ({num_blocks} blocks of {BLOCK_SIZE})"
        )

    def admit(self, generate: Generate, ticket: int) -> Sequence | Rejected:
        """A sequence ready to wait, or why there cannot be one."""
        generation = generate.generation
        try:
            self._check_shape(generation)
            self._check_token_ids(generation)
            limit = self._limit(generation)
        except _Refusal as refusal:
            return Rejected(
                request=generation.request,
                attempt=generation.attempt,
                kind="invalid_request",
                message=refusal.message,
                field=refusal.field,
                code=refusal.code,
            )
        return Sequence(generate, self._rank(generation, ticket), limit, self._stops(generation))

    def _check_shape(self, generation: Generation) -> None:
        count, rest = divmod(len(generation.tokens), TOKEN_BYTES)
        if rest or not 0 < generation.prompt_length <= count:
            raise _Refusal("prompt", "the prompt must hold at least one token")
        if len(generation.block_hashes) != count // BLOCK_SIZE * HASH_BYTES:
            raise _Refusal("prompt", "block hashes do not match the prompt")
        if not math.isfinite(generation.arrival):
            raise _Refusal(None, "arrival must be a finite number")

    def _check_token_ids(self, generation: Generation) -> None:
        vocabulary = self._card.vocab_size
        for field, ids in (
            ("prompt", unpack(generation.tokens)),
            ("stop_token_ids", generation.stopping.stop_token_ids),
            ("logit_bias", [token for token, _ in generation.sampling.logit_bias]),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                wrong = next(i for i in ids if not 0 <= i < vocabulary)
                raise _Refusal(field, f"{field}: token id {wrong} is not in the vocabulary of {vocabulary}")

    def _limit(self, generation: Generation) -> int:
        prompt, wanted = generation.prompt_length, generation.stopping.max_tokens
        if prompt >= self.context:
            raise _Refusal(
                "prompt",
                f"{self._bound}; the prompt has {prompt}, which leaves no room for an answer",
                "context_length_exceeded",
            )
        if wanted is None:
            return self.context
        if wanted < 0 or prompt + wanted > self.context:
            raise _Refusal(
                "max_tokens",
                f"{self._bound}; {prompt + wanted} were requested ({prompt} in the prompt, {wanted} to generate)",
                "context_length_exceeded",
            )
        return prompt + wanted

    def _stops(self, generation: Generation) -> frozenset[int]:
        asked = generation.stopping.stop_token_ids
        eos = () if generation.stopping.ignore_eos else self._card.eos_token_ids
        return frozenset((*asked, *eos))

    def _rank(self, generation: Generation, ticket: int) -> Rank:
        priority = generation.priority if self._policy == "priority" else 0
        return Rank(priority, generation.arrival, ticket)
