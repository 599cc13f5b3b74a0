"""Which library follows a client's grammar, and what it may cost: processor time, memory (docs/adr/0020)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

GrammarBackendName = Literal["auto", "xgrammar", "llguidance"]
"""auto: xgrammar, and llguidance for what that refuses."""

BURST = 25
"""Steps' worth of processor time that a sequence's grammar may take beyond its due, in one step or in many."""


class GrammarLimits(Struct, frozen=True):
    """The limits of one grammar, as the worker's settings have them."""

    compile_seconds: float = 10.0
    """Of processor time."""
    memory: int = 256 << 20
    """Bytes that its process may take beyond what all such processes share."""
    step_seconds: float = 0.02
    """Of processor time, for each token of a sequence; on average, see `BURST`."""

    @property
    def burst_seconds(self) -> float:
        """What one sequence may take beyond `step_seconds` for each of its tokens."""
        return BURST * self.step_seconds

    def message_seconds(self, tokens: int) -> float:
        """What may be taken for `tokens` of all its sequences together. The operating system sees to this one: a call
        into the matcher cannot be interrupted, but its process can be ended."""
        return 2 * self.burst_seconds + tokens * self.step_seconds / 4

    def too_long_to_compile(self) -> str:
        """What the client reads."""
        return f"compiling it takes more than {self.compile_seconds:g} s of processor time (limit grammar_compile_s)"

    def too_slow_to_follow(self) -> str:
        """What the client reads."""
        return (
            f"following it takes more than {self.step_seconds * 1000:g} ms of processor time a token, and "
            f"{self.burst_seconds:g} s more (limit grammar_step_ms); make it less ambiguous or less wide"
        )

    def too_large(self) -> str:
        """What the client reads."""
        return f"it takes more than {self.memory >> 20} MiB of memory (limit grammar_memory)"


DEFAULT_LIMITS = GrammarLimits()
"""As the settings have them where nobody changes any."""
