"""Grammars that a rank's library has compiled, in processes of their own."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.library import CompileResult, GrammarLibrary
from services.worker.guided.limits import DEFAULT_LIMITS, GrammarLimits
from services.worker.guided.protocol import ServerSettings
from services.worker.guided.schema.keywords import GrammarRefused
from shared.messages.generation import Grammar
from shared.messages.worker import GrammarRef

DEADLINE = 120.0


def compiler_of(settings: ServerSettings) -> GrammarCompiler:
    """What the library's server compiles with, in this process."""
    return GrammarCompiler(settings.folder, settings.vocab_size, settings.stops, settings.backend)


@contextmanager
def grammar_library(
    folder: Path, vocab_size: int, stops: tuple[int, ...], limits: GrammarLimits = DEFAULT_LIMITS
) -> Iterator[GrammarLibrary]:
    """Its processes are gone for certain when the context ends."""
    library = GrammarLibrary(ServerSettings(str(folder), vocab_size, stops, limits))
    try:
        yield library
    finally:
        library.close()


def outcomes(library: GrammarLibrary, *grammars: Grammar) -> list[CompileResult]:
    """What becomes of them when they are requested together, in the order in which that is known."""
    told: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    for grammar in grammars:
        library.request(grammar, told.put)
    return [told.get(timeout=DEADLINE) for _ in grammars]


def compile_now(library: GrammarLibrary, grammar: Grammar) -> GrammarRef:
    """As the plans of a scheduler name it from then on. Raises GrammarRefused."""
    (outcome,) = outcomes(library, grammar)
    if outcome.error is not None:
        raise GrammarRefused(outcome.error)
    return GrammarRef(grammar.key, grammar.after)
