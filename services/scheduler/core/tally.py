"""What has happened so far, in numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts since the start; whoever publishes them takes differences."""

    prompt_tokens: int = 0
    """Of all prompts that were begun."""
    cached_tokens: int = 0
    """Those of them that lay in a cache."""
    blocks_saved: int = 0
    """Blocks that the store has shown to others."""
    blocks_unsaved: int = 0
    """Computed blocks that were never offered to the store, because too many waited for it."""
    blocks_loaded: int = 0
    hits: int = 0
    """Times that the store had something of a request."""
    misses: int = 0
    """Times that it had nothing, or did not answer in time."""
    loads_failed: int = 0
    handed_over: int = 0
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
    """What those yielded; over `speculated`, the mean accepted length."""
    grammar_waits: int = 0
    """Requests that waited for their grammar and went on."""
    grammars_refused: int = 0
    """Requests whose grammar could not be compiled."""
    grammar_seconds: float = 0.0
    """What all of these waited."""
    output_tokens: int = 0
    """Drawn and kept."""

    def began(self, prompt: int, cached: int) -> None:
        """A prompt of so many tokens; what was cached of it is no more than that."""
        self.prompt_tokens += prompt
        self.cached_tokens += min(prompt, cached)
