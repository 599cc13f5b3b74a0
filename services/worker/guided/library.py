"""The engine's grammars: compiled on threads beside the steps, kept while they are used."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from services.worker.guided import meters
from services.worker.guided.compiler import Compiler
from services.worker.guided.matcher import Matcher, make_matcher
from services.worker.guided.refusal import GrammarRefused
from shared.messages.generation import Grammar

if TYPE_CHECKING:
    import xgrammar

MOST_KEPT = 512
"""Grammars; whichever was used longest ago goes first. Schedulers remember fewer."""
MOST_BYTES = 512 << 20
MOST_WAITING = 256
"""Grammars that wait for a thread. A scheduler sends fewer."""
THREADS = 2
MOST_STUCK = 4
"""Threads that may be written off because a grammar took them too long; with as many stuck, nothing new is compiled."""
STUCK_AFTER = 10.0
"""Seconds; schedulers ask again after more. A compilation cannot be ended from outside: its thread is replaced, and
ends when it is through."""

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    grammar: Grammar
    error: str | None
    """Why it cannot be compiled, and where."""


class GrammarLibrary:
    """Owns the compiled grammars and the threads that compile. Used from any thread."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._asked: dict[Grammar, list[Callable[[Outcome], None]]] = {}
        self._queue: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
        self._begun: dict[int, float] = {}
        """When each working thread began with its grammar."""
        self._stuck: set[int] = set()
        self._threads = 0
        self._numbers = count()

    def ask(self, grammar: Grammar, tell: Callable[[Outcome], None]) -> None:
        """Has `grammar` compiled, and `tell` called with the outcome: at once or later, on any thread."""
        key = plain(grammar)
        with self._lock:
            self._write_off()
            known = key in self._kept
            refusal = None if known or key in self._asked else self._too_busy()
            if not known and refusal is None:
                self._asked.setdefault(key, []).append(lambda outcome: tell(Outcome(grammar, outcome.error)))
                if len(self._asked[key]) == 1:
                    self._queue.put(key)
                self._start_thread()
        if known or refusal is not None:
            tell(Outcome(grammar, refusal))

    def compiled(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """A grammar that was compiled before; again, and the caller waits, where it has been forgotten since. Raises
        GrammarRefused."""
        key = plain(grammar)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        log.info("grammar compiled again", extra={"kind": grammar.kind, "bytes": len(grammar.text)})
        return self._compile(key)

    def matcher(self, grammar: Grammar, stops: tuple[int, ...]) -> Matcher:
        """A new matcher of a grammar that was compiled before, ended by any of `stops`; by the model's own where there
        are none. Raises GrammarRefused."""
        return make_matcher(
            self.compiled(grammar), stops or self.compiler.stops, grammar.after, self.compiler.spelling()
        )

    def _too_busy(self) -> str | None:
        if len(self._stuck) >= MOST_STUCK:
            return "the engine is still busy with other requests' grammars that take very long to compile; try later"
        if len(self._asked) >= MOST_WAITING:
            return f"{MOST_WAITING} grammars are being compiled already; try again later"
        return None

    def _write_off(self) -> None:
        now = time.monotonic()
        self._stuck |= {number for number, begun in self._begun.items() if now - begun > STUCK_AFTER}

    def _start_thread(self) -> None:
        """One more, where all that are not stuck have work and another is allowed."""
        if self._threads - len(self._stuck) < THREADS:
            self._threads += 1
            threading.Thread(target=self._run, args=(next(self._numbers),), name="grammars", daemon=True).start()

    def _run(self, number: int) -> None:
        replaced = False
        while not replaced:
            grammar = self._queue.get()
            with self._lock:
                self._begun[number] = time.monotonic()
            error = self._tried(grammar)
            replaced = self._is_replaced(number)
            self._answer(grammar, error)

    def _is_replaced(self, number: int) -> bool:
        """Whether a thread that is through was written off meanwhile."""
        with self._lock:
            del self._begun[number]
            if number not in self._stuck:
                return False
            self._stuck.discard(number)
            self._threads -= 1
            return True

    def _tried(self, grammar: Grammar) -> str | None:
        """The reason why it cannot be compiled."""
        started = time.monotonic()
        try:
            self._compile(grammar)
        except GrammarRefused as refused:
            return str(refused)
        finally:
            meters.COMPILE_SECONDS.observe(time.monotonic() - started)
        return None

    def _answer(self, grammar: Grammar, error: str | None) -> None:
        with self._lock:
            waiting = self._asked.pop(grammar, [])
        meters.COMPILED.labels("refused" if error else "compiled").inc()
        for tell in waiting:
            tell(Outcome(grammar, error))

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiled = self.compiler.compile(grammar)
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = compiled
                self._bytes += compiled.memory_size_bytes
            while len(self._kept) > 1 and (len(self._kept) > MOST_KEPT or self._bytes > MOST_BYTES):
                self._bytes -= self._kept.popitem(last=False)[1].memory_size_bytes
        return compiled


def plain(grammar: Grammar) -> Grammar:
    """The same wherever it begins to bind: it is compiled once."""
    return grammar if not grammar.after else Grammar(grammar.kind, grammar.text, compact=grammar.compact)
