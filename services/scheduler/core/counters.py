"""An engine's counters, which only grow, and snapshots of its state at one moment."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from shared.ids import Incarnation
from shared.messages.lifecycle import LATENCY_BOUNDS, EngineHealth
from shared.messages.model_card import ModelCard


@dataclass(slots=True)
class EngineCounters:
    """Counts since the engine's start. Rates are differences of two snapshots."""

    prompt_tokens: int = 0
    """Prompt tokens of all requests that entered a step."""
    cached_tokens: int = 0
    """How many of `prompt_tokens` a cache held, so that they were not computed."""
    loaded_tokens: int = 0
    """How many of `cached_tokens` were loaded from a KV store."""
    blocks_saved: int = 0
    """Blocks that were committed to the KV store."""
    blocks_unsaved: int = 0
    """Computed blocks that were not offered to the store because too many were waiting."""
    blocks_loaded: int = 0
    """Blocks that were copied from the store."""
    hits: int = 0
    """Lookups for which the store held at least one block."""
    misses: int = 0
    """Lookups for which the store held nothing or did not reply in time."""
    loads_failed: int = 0
    """Loads that a rank could not copy; their prompts were computed instead."""
    loads_overlapped: int = 0
    """Loads by a KV connector behind which the plan that began them computed, layer by layer."""
    loads_declined: int = 0
    """Requests whose blocks were in the node's store, and were computed because that is sooner."""
    passed_on: int = 0
    """Requests whose prompt another engine computes for this one."""
    swapped_in: int = 0
    """Preempted requests that went on with blocks from the store."""
    recomputed: int = 0
    """Preempted requests whose blocks were computed again, but for what their own memory still had."""
    handed_over: int = 0
    """Requests that were handed over to another engine."""
    kept: int = 0
    """Requests that were to be handed over but are decoded here, because their blocks could not be saved."""
    prompts_shared: int = 0
    """Requests that waited for another request's prefill of the same blocks instead of computing them."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: tuple[int, ...] = ()
    """Accepted draft tokens by their position: first, second, and so on."""
    speculated: int = 0
    """Steps of single sequences in which drafts were verified."""
    speculated_tokens: int = 0
    """Tokens that those steps yielded; divided by `speculated` it is the mean accepted length."""
    grammar_waits: int = 0
    """Requests that waited for their grammar to compile, and then continued."""
    grammars_refused: int = 0
    """Requests whose grammar could not be compiled."""
    grammar_seconds: float = 0.0
    """Seconds that requests waited for grammars, in total."""
    canaries: int = 0
    """Canaries that have ended."""
    canary_faults: int = 0
    """How many of `canaries` had a wrong answer, a late one or none."""
    canary_seconds: float = 0.0
    """From their first step to their end, in total."""
    undefined: int = 0
    """Sequences that failed because the model computed NaN."""
    output_tokens: int = 0
    """Output tokens, without rejected drafts."""
    first_tokens: int = 0
    """Requests that got their first token here."""
    first_token_seconds: float = 0.0
    """From their coming to their first tokens, in total."""
    later_tokens: int = 0
    """Output tokens behind a request's first one."""
    later_token_seconds: float = 0.0
    """From the token before to each of them, in total; tokens of one step come together."""
    first_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    """See `LatencySums.first_counts`."""
    later_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))

    def record_first_token(self, waited: float) -> None:
        """A request has its first token here, so many seconds after it came."""
        self.output_tokens += 1
        self.first_tokens += 1
        self.first_token_seconds += waited
        self.first_counts[bisect_left(LATENCY_BOUNDS, waited)] += 1

    def record_later_tokens(self, tokens: int, waited: float) -> None:
        """Requests have so many tokens more, each so many seconds after the one before it."""
        self.output_tokens += tokens
        self.later_tokens += tokens
        self.later_token_seconds += tokens * waited
        self.later_counts[bisect_left(LATENCY_BOUNDS, waited)] += tokens


@dataclass(frozen=True, slots=True)
class EpochSnapshot:
    """The state of an engine's present epoch at one moment; it exists only while the engine has workers."""

    epoch: Incarnation
    model: ModelCard
    max_running: int
    waiting: int
    running: int
    compiling: int
    """How many of the waiting requests wait for their grammar."""
    prefill_tokens: int
    """Prompt tokens of all requests that are still to be computed."""
    transfers: int
    """Transfers between the ranks and the KV store that have not finished."""
    blocks_total: int
    """Blocks of tokens, as the two below: where groups of layers have tables of their own each takes one of the pool
    for each group."""
    blocks_free: int
    blocks_cached: int
    """How many of the free blocks have cached contents."""
    steps: int
    """Steps that have finished in this epoch."""
    step_deadline: float
    """Seconds that the step in flight may take; 0 without one."""
    preemptions: int


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of an engine at one moment, for reports; `epoch` is None while there are no workers."""

    counters: EngineCounters
    """A copy of the counters."""
    requests: int
    """Of clients."""
    epoch: EpochSnapshot | None
    health: EngineHealth
