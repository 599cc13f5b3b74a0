"""What every worker rank of an engine hears: what to compute next. Carries only what changed."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import Incarnation, SequenceId
from shared.messages.generation import SamplingParams


class NewSequence(Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence that the worker does not hold yet (or no longer, after preemption)."""

    sequence: SequenceId
    tokens: bytes
    """Packed uint32: everything known, prompt and output so far."""
    prompt_length: int
    """Where output begins: sampling positions and the output penalties count from here."""
    computed: int
    """Leading tokens whose keys and values already lie in `blocks` (a prefix-cache hit)."""
    blocks: bytes
    """Packed uint32 block ids, in order; holds at least `computed` tokens. More come with the work."""
    sampling: SamplingParams
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn before `min_tokens` (end-of-sequence ids included unless ignored)."""


class Work(Struct, frozen=True, array_like=True):
    """One sequence's share of a step: compute its next `count` tokens."""

    sequence: SequenceId
    count: int
    blocks: bytes
    """Packed ids of newly assigned blocks, appended to the sequence's block table."""
    sample: bool
    """Draw a token from the last position; the worker appends it to the sequence itself."""


class StepPlan(Struct, frozen=True, array_like=True, kw_only=True):
    """scheduler → every rank. (epoch, step) are consecutive from step 0; a new epoch drops every sequence.

    Order of effect: `released`, then `new`, then `work`. All blocks' contents survive until they are written again.
    """

    epoch: Incarnation
    step: int
    released: tuple[SequenceId, ...] = ()
    new: tuple[NewSequence, ...] = ()
    work: tuple[Work, ...] = ()
