"""An engine's counters, which only grow, and snapshots of its state at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import Incarnation
from shared.messages.lifecycle import ModelCard


@dataclass(slots=True)
class EngineCounters:
    """Counts since the start; to publish them as rates, take differences."""

    prompt_tokens: int = 0
    """Of all prompts whose computation was started."""
    cached_tokens: int = 0
    """Those of them that were in a cache."""
    blocks_saved: int = 0
    """Blocks that the store has shown to others."""
    blocks_unsaved: int = 0
    """Computed blocks that were never offered to the store, because too many waited for it."""
    blocks_loaded: int = 0
    """Blocks that were copied from the store."""
    hits: int = 0
    """Times that the store had something of a request."""
    misses: int = 0
    """Times that it had nothing, or did not reply in time."""
    loads_failed: int = 0
    """Loads that a rank could not copy, so that the prompt was computed."""
    handed_over: int = 0
    """Requests that another engine went on with."""
    kept: int = 0
    """Requests that were to be handed over and are decoded here, because their blocks could not be saved."""
    prompts_shared: int = 0
    """Times that a request waited for another one's prefill instead of computing the same."""
    drafted: int = 0
    """Draft tokens that were tried."""
    accepted: tuple[int, ...] = ()
    """Of those, at the first position, the second, and so on."""
    speculated: int = 0
    """Times that a sequence's step tried drafts."""
    speculated_tokens: int = 0
    """Tokens that those yielded; divided by `speculated`, the mean accepted length."""
    grammar_waits: int = 0
    """Requests that waited for their grammar and went on."""
    grammars_refused: int = 0
    """Requests whose grammar could not be compiled."""
    grammar_seconds: float = 0.0
    """What all of these waited."""
    output_tokens: int = 0
    """Drawn and kept."""


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """The state of an engine's present epoch at one moment; there is one while the engine has workers."""

    epoch: Incarnation
    model: ModelCard
    max_running: int
    waiting: int
    running: int
    compiling: int
    """Of those waiting, the ones that wait for their grammar."""
    prefill_tokens: int
    """Tokens of all requests that are still to be computed."""
    transfers: int
    """Copies between the ranks and the store under way."""
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    """The free blocks with cached contents."""
    steps: int
    """Finished."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of an engine at one moment, to be reported; `epoch` is None while there are no workers."""

    counters: EngineCounters
    """As they were: a copy."""
    requests: int
    epoch: EpochSnapshot | None
