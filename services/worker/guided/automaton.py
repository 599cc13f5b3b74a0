"""What a grammar back end is to the rest: it compiles a grammar, and follows it for one sequence. No library here."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.messages.generation import Grammar

Bits = NDArray[np.int32]


class AutomatonFailed(Exception):
    """A back end cannot follow its grammar any further: a limit of its own was passed."""


class Automaton(Protocol):
    """Where a sequence is in its grammar. Stop tokens are no text: they end it, where it may end."""

    def fill(self, bits: Bits) -> None:
        """Which tokens may follow, stop tokens included, into `bits` [words]. Raises AutomatonFailed."""
        ...

    def accept_token(self, token: int) -> bool:
        """Goes on behind `token`, by one step; False, and nothing changes, where it may not follow."""
        ...

    def accept_bytes(self, text: bytes) -> int:
        """Goes on behind `text`: by how many steps; 0, and nothing changes, where it may not follow."""
        ...

    def rollback(self, steps: int) -> None:
        """Takes the last `steps` back."""
        ...

    def is_terminated(self) -> bool:
        """Whether a stop token has ended it."""
        ...

    def forced_text(self) -> str:
        """The text that alone can follow; empty where there is none, or it is cut within a character."""
        ...


class CompiledGrammar(Protocol):
    """What the automata of all sequences with one grammar are made from."""

    @property
    def memory_size_bytes(self) -> int:
        """As far as the library says."""
        ...

    def automaton(self, stops: tuple[int, ...]) -> Automaton:
        """At its start, ended by any of `stops`. Raises AutomatonFailed."""
        ...


class GrammarBackend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def load(self) -> None:
        """Does ahead what all grammars need. Raises GrammarRefused."""
        ...

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Takes milliseconds to seconds. Raises GrammarRefused."""
        ...
