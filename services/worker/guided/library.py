"""The engine's grammars: each is compiled and followed in a process of its own, beside the steps (docs/adr/0020).

Compiling is fair: whatever has run for less than `QUICK_SECONDS` goes first, so slow grammars delay one another and
nobody else. Of those that take longer one runs at a time; the others stand still.
"""

from __future__ import annotations

import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from services.worker.guided import metrics
from services.worker.guided.processes import GrammarGone, GrammarProcess, ServerLink
from services.worker.guided.protocol import Compile, Compiled, MatcherReady, ServerSettings
from shared.ids import GrammarKey
from shared.messages.generation import Grammar
from shared.messages.scheduler import GrammarFault

MAX_WAITING = 256
"""Grammars that wait to be compiled. A scheduler sends fewer."""
MAX_STALE = 64
"""Compiled grammars that are kept from earlier epochs. The scheduler of this one says which of its own to forget."""
QUICK_AT_ONCE = 2
QUICK_SECONDS = 1.0
"""What a grammar takes to compile before others go first."""
SLOW_AT_ONCE = 1
MAX_SLOW = 8
"""Slow ones that are begun; each holds memory. The next one is told to come again."""
_TICK = 0.05
"""Seconds between two looks at what is being compiled."""

log = logging.getLogger(__name__)


class CompileResult(NamedTuple):
    """What became of a grammar that was to be compiled."""

    grammar: GrammarKey
    error: str | None
    """Why it is not compiled."""
    fault: GrammarFault = "refused"


Report = Callable[[CompileResult], None]


@dataclass(slots=True)
class _Job:
    grammar: Grammar
    key: GrammarKey
    reports: list[Report]
    process: GrammarProcess | None = None
    begun: float = 0.0
    ran: float = 0.0
    """Seconds that it did not stand still."""
    paused: bool = False


@dataclass(slots=True)
class _Lanes:
    """What is to be compiled, and what is."""

    waiting: deque[_Job] = field(default_factory=deque)
    running: list[_Job] = field(default_factory=list)
    """In the order in which they were begun."""

    def job(self, key: GrammarKey) -> _Job | None:
        """That of a grammar, if it has one."""
        return next((job for job in (*self.waiting, *self.running) if job.key == key), None)


class GrammarLibrary:
    """Owns the processes of all grammars, and the thread that has them compiled. Used from any thread."""

    def __init__(self, settings: ServerSettings) -> None:
        """Starts nothing: most engines are never asked for a grammar."""
        self.settings = settings
        self._server: ServerLink | None = None
        self._processes: dict[GrammarKey, GrammarProcess] = {}
        self._stale: dict[GrammarKey, None] = {}
        self._lanes = _Lanes()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._ticked = 0.0
        self.awaited = False
        """Whether a step waits for a grammar's process, which has a deadline of its own; written by
        `GuidedSequences`."""

    def request(self, grammar: Grammar, report: Report) -> None:
        """Has `grammar` compiled, and `report` called with the outcome, later, on another thread."""
        self._command(lambda: self._request(grammar, report))

    def forget(self, keys: Iterable[GrammarKey]) -> None:
        """No sequence follows these any more."""
        for key in keys:
            self._command(partial(self._end, key))

    def start_epoch(self) -> None:
        """What is compiled is kept as long as there is room, in case that it is requested again."""
        self._command(lambda: self._stale.update(dict.fromkeys(self._processes)))

    def process(self, key: GrammarKey) -> GrammarProcess | None:
        """Where sequences follow this grammar; None where it is not compiled."""
        return self._processes.get(key)

    def close(self) -> None:
        """Ends all processes, and the thread."""
        if self._thread is not None:
            self._command(self._stop)
            self._thread.join()
            self._selector.close()
            self._wake.close()
            self._woken.close()

    def _command(self, command: Callable[[], None]) -> None:
        with self._starting:
            if self._thread is None:
                self._wake, self._woken = socket.socketpair()
                self._selector = selectors.DefaultSelector()
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
        self._commands.put(command)
        self._wake.send(b"\0")

    # ---- on the thread

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while True:
                ready = self._selector.select(_TICK if self._lanes.running else None)
                for key, _ in ready:
                    self._take(key.fileobj)
                self._schedule(time.monotonic())
        except SystemExit:
            return

    def _take(self, source: object) -> None:
        if source is self._woken:
            for _ in self._woken.recv(4096):
                self._commands.get()()
        elif self._server is not None and source is self._server.socket:
            self._server.read()
            if not self._server.alive:
                self._lose_server()
        else:
            job = next((job for job in self._lanes.running if job.process and job.process.channel is source), None)
            if job is not None:
                self._progress(job)

    def _request(self, grammar: Grammar, report: Report) -> None:
        key = grammar.key
        self._stale.pop(key, None)
        if (process := self._processes.get(key)) is not None and process.gone:
            self._end(key)
        job = self._lanes.job(key)
        if key in self._processes:
            report(CompileResult(key, None))
        elif job is not None:
            job.reports.append(report)
        elif len(self._lanes.waiting) >= MAX_WAITING:
            error = f"{MAX_WAITING} grammars are waiting to be compiled already; try again later"
            report(CompileResult(key, error, "busy"))
        else:
            self._lanes.waiting.append(_Job(grammar, key, [report]))

    def _schedule(self, now: float) -> None:
        """Who is compiled next, and who stands still meanwhile."""
        lanes, passed, self._ticked = self._lanes, now - self._ticked, now
        if not lanes.waiting and not lanes.running:
            return
        server = self._running_server()
        if server.loaded is None:
            return
        if server.loaded.error is not None:
            for job in list(lanes.waiting):
                lanes.waiting.remove(job)
                self._settle(job, server.loaded.error, "refused")
            return
        for job in lanes.running:
            job.ran += 0.0 if job.paused else min(passed, now - job.begun)
        slow = [job for job in lanes.running if job.ran >= QUICK_SECONDS]
        for job in slow[MAX_SLOW:]:
            self._abort(job, "other grammars that take long are being compiled; try again later", "busy")
        for place, job in enumerate(slow[:MAX_SLOW]):
            self._pause(job, paused=place >= SLOW_AT_ONCE)
        for _ in range(QUICK_AT_ONCE - (len(lanes.running) - min(len(slow), MAX_SLOW))):
            if lanes.waiting:
                self._begin(lanes.waiting.popleft(), server, now)

    def _running_server(self) -> ServerLink:
        if self._server is None:
            self._server = ServerLink(self.settings)
            self._selector.register(self._server.socket, selectors.EVENT_READ)
        return self._server

    def _begin(self, job: _Job, server: ServerLink, now: float) -> None:
        while self._stale and len(self._processes) >= MAX_STALE:
            self._end(next(iter(self._stale)))
        job.process, job.begun = server.fork(), now
        self._lanes.running.append(job)
        self._selector.register(job.process.channel, selectors.EVENT_READ)
        try:
            job.process.send(Compile(job.grammar))
        except GrammarGone as gone:
            self._abort(job, gone.error, gone.fault)

    def _progress(self, job: _Job) -> None:
        """It is compiled, or tried, or neither ever will be."""
        assert job.process is not None, "only a process makes progress"
        try:
            message, _ = job.process.receive()
        except GrammarGone as gone:
            self._abort(job, gone.error, gone.fault)
            return
        match message:
            case Compiled(error):
                job.process.compiled = True
                if error is not None:
                    self._abort(job, error, "refused")
            case MatcherReady(error):
                if error is not None:
                    self._abort(job, error, "refused")
                    return
                self._leave(job)
                self._processes[job.key] = job.process
                metrics.PROCESSES.set(len(self._processes))
                self._settle(job, None, "refused")
            case _:
                raise AssertionError(f"while it compiles: {message!r}")

    def _pause(self, job: _Job, *, paused: bool) -> None:
        if job.paused != paused and job.process is not None:
            job.paused = paused
            job.process.pause(paused=paused)

    def _abort(self, job: _Job, error: str, fault: GrammarFault) -> None:
        self._leave(job)
        if job.process is not None:
            job.process.end()
        self._settle(job, error, fault)

    def _leave(self, job: _Job) -> None:
        self._lanes.running.remove(job)
        if job.process is not None:
            self._selector.unregister(job.process.channel)

    def _settle(self, job: _Job, error: str | None, fault: GrammarFault) -> None:
        metrics.COMPILED.labels(fault if error else "compiled").inc()
        metrics.COMPILE_SECONDS.observe(job.ran)
        if error is not None:
            log.info("grammar not compiled", extra={"kind": job.grammar.kind, "reason": error, "fault": fault})
        for report in job.reports:
            report(CompileResult(job.key, error, fault))

    def _end(self, key: GrammarKey) -> None:
        self._stale.pop(key, None)
        process = self._processes.pop(key, None)
        if process is not None:
            process.end()
        metrics.PROCESSES.set(len(self._processes))

    def _lose_server(self) -> None:
        """All processes are gone with it; the next grammar starts another."""
        assert self._server is not None, "it was there to be lost"
        log.error("the server of grammars' processes has ended")
        for job in list(self._lanes.running):
            self._abort(job, "the server of grammars' processes has ended", "lost")
        while self._lanes.waiting:
            self._settle(self._lanes.waiting.popleft(), "the server of grammars' processes has ended", "lost")
        for key in list(self._processes):
            self._end(key)
        self._selector.unregister(self._server.socket)
        self._server.close()
        self._server = None

    def _stop(self) -> None:
        for key in list(self._processes):
            self._end(key)
        for job in list(self._lanes.running):
            self._leave(job)
        if self._server is not None:
            self._server.close()
        raise SystemExit
