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

from services.worker.guided import metrics
from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.matcher import GrammarMatcher, make_matcher
from services.worker.guided.schema.keywords import GrammarRefused
from shared.messages.generation import Grammar

if TYPE_CHECKING:
    import xgrammar

MAX_KEPT = 512
"""Grammars; whichever was used longest ago goes first. Schedulers remember fewer."""
MAX_BYTES = 512 << 20
MAX_WAITING = 256
"""Grammars that wait for a thread. A scheduler sends fewer."""
THREADS = 2
MAX_STUCK = 4
"""Threads that may be written off because a grammar took them too long; with as many stuck, nothing new is compiled."""
STUCK_TIMEOUT = 10.0
"""Seconds; schedulers ask again after more. A compilation cannot be ended from outside: its thread is replaced, and
ends when it is through."""

log = logging.getLogger(__name__)


class CompileResult(NamedTuple):
    """What became of a grammar that was to be compiled."""

    grammar: Grammar
    error: str | None
    """Why it cannot be compiled, and where."""


class GrammarLibrary:
    """Owns the compiled grammars and the threads that compile. Used from any thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, xgrammar.CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._waiting: dict[Grammar, list[Callable[[CompileResult], None]]] = {}
        self._queue: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
        self._started: dict[int, float] = {}
        """When each working thread began with its grammar."""
        self._stuck: set[int] = set()
        self._threads = 0
        self._numbers = count()

    def request(self, grammar: Grammar, report: Callable[[CompileResult], None]) -> None:
        """Has `grammar` compiled, and `report` called with the outcome: at once or later, on any thread."""
        key = unanchored(grammar)
        with self._lock:
            self._mark_stuck()
            known = key in self._kept
            refusal = None if known or key in self._waiting else self._too_busy()
            if not known and refusal is None:
                self._waiting.setdefault(key, []).append(lambda outcome: report(CompileResult(grammar, outcome.error)))
                if len(self._waiting[key]) == 1:
                    self._queue.put(key)
                self._start_thread()
        if known or refusal is not None:
            report(CompileResult(grammar, refusal))

    def compiled(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """A grammar that was compiled before; again, and the caller waits, where it has been forgotten since. Raises
        GrammarRefused."""
        key = unanchored(grammar)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        log.info("grammar compiled again", extra={"kind": grammar.kind, "bytes": len(grammar.text)})
        return self._compile(key)

    def matcher(self, grammar: Grammar, stops: tuple[int, ...]) -> GrammarMatcher:
        """A new matcher of a grammar that was compiled before, ended by any of `stops`; by the model's own where there
        are none. Raises GrammarRefused."""
        return make_matcher(
            self.compiled(grammar), stops or self.compiler.stops, grammar.after, self.compiler.spelling()
        )

    def _too_busy(self) -> str | None:
        if len(self._stuck) >= MAX_STUCK:
            return "the engine is still busy with other requests' grammars that take very long to compile; try later"
        if len(self._waiting) >= MAX_WAITING:
            return f"{MAX_WAITING} grammars are being compiled already; try again later"
        return None

    def _mark_stuck(self) -> None:
        now = time.monotonic()
        self._stuck |= {number for number, begun in self._started.items() if now - begun > STUCK_TIMEOUT}

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
                self._started[number] = time.monotonic()
            error = self._compile_error(grammar)
            replaced = self._is_replaced(number)
            self._answer(grammar, error)

    def _is_replaced(self, number: int) -> bool:
        """Whether a thread that is through was written off meanwhile."""
        with self._lock:
            del self._started[number]
            if number not in self._stuck:
                return False
            self._stuck.discard(number)
            self._threads -= 1
            return True

    def _compile_error(self, grammar: Grammar) -> str | None:
        """The reason why it cannot be compiled."""
        started = time.monotonic()
        try:
            self._compile(grammar)
        except GrammarRefused as refused:
            return str(refused)
        finally:
            metrics.COMPILE_SECONDS.observe(time.monotonic() - started)
        return None

    def _answer(self, grammar: Grammar, error: str | None) -> None:
        with self._lock:
            waiting = self._waiting.pop(grammar, [])
        metrics.COMPILED.labels("refused" if error else "compiled").inc()
        for report in waiting:
            report(CompileResult(grammar, error))

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        compiled = self.compiler.compile(grammar)
        with self._lock:
            if grammar not in self._kept:
                self._kept[grammar] = compiled
                self._bytes += compiled.memory_size_bytes
            while len(self._kept) > 1 and (len(self._kept) > MAX_KEPT or self._bytes > MAX_BYTES):
                self._bytes -= self._kept.popitem(last=False)[1].memory_size_bytes
        return compiled


def unanchored(grammar: Grammar) -> Grammar:
    """The grammar without the text behind which it binds: it is compiled once, whatever that is."""
    return grammar if not grammar.after else Grammar(grammar.kind, grammar.text, compact=grammar.compact)
