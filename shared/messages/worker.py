"""Messages to every worker rank of an engine: what to compute next. They carry only what changed."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import ArenaId, GrammarKey, Incarnation, SequenceId
from shared.messages.generation import Grammar, SamplingOptions

MAX_PROMPT_LOGPROB_TOKENS_PER_PLAN = 512
"""Most prompt tokens in a plan that belong to sequences with `SamplingOptions.prompt_logprobs`. Each takes a row of
logits on the device, as wide as the vocabulary; other prompt tokens take none."""
MAX_PROMPT_LOGPROBS_PER_PLAN = 16_384
"""Most log-probabilities of prompt tokens in the result of one plan: each token's own and its most likely ones', a few
bytes each."""


class GrammarRef(Struct, frozen=True, array_like=True):
    """A grammar that the workers have compiled: an earlier plan had it in `compile`, and it was answered without an
    error. Its text is never sent again, however many sequences follow it."""

    key: GrammarKey
    after: str = ""
    """See `Grammar.after`."""


class NewSequence(Struct, frozen=True, array_like=True, kw_only=True):
    """A sequence that the worker does not hold yet (or no longer, after preemption)."""

    sequence: SequenceId
    tokens: bytes
    """Packed uint32: all known tokens, prompt and output so far."""
    prompt_length: int
    """Where output begins: sampling positions and the output penalties count from here."""
    computed: int
    """Number of leading tokens whose keys and values already lie in `blocks` (a prefix-cache hit)."""
    blocks: bytes
    """Packed uint32 block ids, in order; holds at least `computed` tokens. More come with the work."""
    sampling: SamplingOptions
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that may not be drawn before `min_tokens` (end-of-sequence ids included unless ignored)."""
    grammar: GrammarRef | None = None
    """Grammar of the output; None without one."""


class SequenceWork(Struct, frozen=True, array_like=True, gc=False):
    """One sequence's share of a step: compute its next `count` tokens."""

    sequence: SequenceId
    count: int
    blocks: bytes
    """Packed ids of newly assigned blocks, appended to the sequence's block table."""
    sample: bool
    """Draw a token from the last position; the worker appends it to the sequence itself."""
    speculate: int = 0
    """Tokens that the step may yield beyond the drawn one: drafted by the worker and verified in the same step, or
    forced by the grammar. `blocks` has room for all of them. Rejected ones are overwritten by a later step."""


class Transfer(Struct, frozen=True, array_like=True, kw_only=True):
    """KV blocks to copy between a rank's memory and the node's KV store while steps compute; each rank copies its own
    heads.

    A load begins when all plans before this one are computed, a save when this one is. Transfers run in order. Until
    every rank has reported the transfer as done (`TransferProgress`), the blocks are not used and the slots not written
    by anyone else.
    """

    number: int
    """Consecutive within the epoch, from 0."""
    kind: Literal["load", "save"]
    arena: ArenaId
    path: str
    """The arena's file, relative to the directory that worker and store are configured with."""
    blocks: bytes
    """Packed uint32 block ids of the rank."""
    slots: bytes
    """Packed uint32 arena slots, one for each block."""
    generations: bytes
    """Packed uint64, one for each slot. If a slot has another generation its content has changed, and the transfer
    fails."""


class StepPlan(Struct, frozen=True, array_like=True, kw_only=True):
    """scheduler → every rank. (epoch, step) are consecutive from step 0; a new epoch drops every sequence.

    Order of effect: `released`, then `new`, then `work`. All blocks' contents survive until they are written again.
    A plan may hold nothing but transfers.
    """

    epoch: Incarnation
    step: int
    released: tuple[SequenceId, ...] = ()
    new: tuple[NewSequence, ...] = ()
    work: tuple[SequenceWork, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    compile: tuple[Grammar, ...] = ()
    """Compile these beside the steps; the rank that samples answers each with `GrammarCompiled`."""
    forget: tuple[GrammarKey, ...] = ()
    """Compiled grammars that no sequence follows any more."""
