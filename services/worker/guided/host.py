"""The process of one grammar: it compiles it, and follows it for all sequences that have it. Started by `fork_server`.

What a client's grammar costs is not known before it is run, and a call into the matcher cannot be interrupted. So each
grammar has a process, which sets itself limits that the operating system enforces: beyond them it ends, and with it the
sequences that follow this grammar and no others.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from services.worker.guided.automaton import AutomatonFailed, Bits, CompiledGrammar
from services.worker.guided.compiler import GrammarCompiler
from services.worker.guided.limits import GrammarLimits
from services.worker.guided.matcher import GrammarMatcher, allows, make_matcher
from services.worker.guided.protocol import (
    Accept,
    Channel,
    ChannelClosed,
    Compile,
    Compiled,
    Failure,
    Fill,
    Filled,
    Jumped,
    JumpForward,
    MatcherReady,
    StartMatching,
    StopMatching,
    ToProcess,
)
from services.worker.guided.schema.keywords import GrammarRefused
from services.worker.sampling.token_bits import mask_words
from shared.messages.generation import Grammar
from shared.packing import unpack

TRIED_JUMP = 16
"""Forced tokens that a grammar is tried with: as many as a step may draft."""
_PR_SET_PDEATHSIG = 1
_FIRST_VICTIM = "500"
"""Of a machine that runs out of memory: rather a grammar than a rank."""

_libc = ctypes.CDLL(None)
_decoder = msgspec.msgpack.Decoder(ToProcess)


@dataclass(slots=True)
class _FollowedSequence:
    """A sequence, and what its grammar has taken."""

    matcher: GrammarMatcher
    mask: Bits | None = None
    """[1 + drafts, words] what its next tokens are drawn under."""
    debt: float = 0.0
    """Seconds of processor time beyond its due."""


class OutOfMemory(Exception):
    """The process may take no more memory, in the midst of following its grammar."""


class GrammarHost:
    """Owns the compiled grammar and its matchers, in a process of their own."""

    def __init__(self, channel: Channel, compiler: GrammarCompiler, limits: GrammarLimits) -> None:
        self._channel = channel
        self._compiler = compiler
        self._limits = limits
        self._words = mask_words(compiler.vocab_size)
        self._followed: dict[int, _FollowedSequence] = {}
        self._failed: list[Failure] = []
        """Not reported yet."""
        self._compiled: CompiledGrammar | None = None

    def run(self) -> None:
        """Until the other end closes the channel. Raises OutOfMemory; beyond other limits the process ends."""
        with suppress(ChannelClosed):
            while True:
                message, _ = self._channel.receive(_decoder)
                try:
                    self._handle(message)
                except MemoryError:
                    raise OutOfMemory from None
                except RuntimeError as error:
                    if "bad_alloc" in str(error):  # as the library spells it
                        raise OutOfMemory from None
                    raise

    def _handle(self, message: object) -> None:
        match message:
            case Compile(grammar):
                self._compile(grammar)
            case StartMatching(_, _, _, output):
                with self._within(len(output)):
                    self._start(message)
            case StopMatching(number):
                self._followed.pop(number, None)
            case Accept(drawn):
                with self._within(sum(len(tokens) for _, tokens in drawn)):
                    self._accept(message)
            case Fill(wanted):
                with self._within(sum(1 + len(drafts) for _, drafts in wanted)):
                    self._fill(message)
            case JumpForward(wanted):
                with self._within(sum(most for _, most in wanted)):
                    tokens = tuple(tuple(self._jump_forward(*one)) for one in wanted)
                self._channel.send(Jumped(tokens))
            case _:
                raise AssertionError(f"no message to a grammar's process: {message!r}")

    @contextmanager
    def _within(self, tokens: int) -> Iterator[None]:
        """The process ends, by SIGPROF, where it takes longer than so many tokens may."""
        signal.setitimer(signal.ITIMER_PROF, self._limits.message_seconds(tokens))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _compile(self, grammar: Grammar) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._limits.compile_seconds)
        error = self._compile_error(grammar)
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._channel.send(Compiled(error))
        if error is None:
            self._channel.send(MatcherReady(self._trial_error()))

    def _trial_error(self) -> str | None:
        with self._within(TRIED_JUMP):
            try:
                matcher = self._matcher((), "")
                matcher.fill(np.empty((1, self._words), dtype=np.int32))
                matcher.jump_forward(TRIED_JUMP)
            except AutomatonFailed as failed:
                return str(failed)
        return None

    def _compile_error(self, grammar: Grammar) -> str | None:
        try:
            with _no_warnings():
                self._compiled = self._compiler.compile(grammar)
        except GrammarRefused as refused:
            return self._limits.too_large() if "bad_alloc" in str(refused) else str(refused)
        except MemoryError:
            return self._limits.too_large()
        return None if self._compiled.memory_size_bytes <= self._limits.memory else self._limits.too_large()

    def _matcher(self, stops: tuple[int, ...], after: str) -> GrammarMatcher:
        assert self._compiled is not None, "nothing follows a grammar that is not compiled"
        return make_matcher(self._compiled, stops or self._compiler.stops, after, self._compiler.spelling())

    def _start(self, start: StartMatching) -> None:
        followed = self._followed[start.number] = _FollowedSequence(self._matcher(start.stops, start.after))
        with self._failing(start.number):
            followed.matcher.replay(unpack(start.output))

    def _accept(self, message: Accept) -> None:
        for number, tokens in message.drawn:
            followed = self._followed.get(number)
            if followed is None:
                continue
            begun = time.process_time()
            mask, followed.mask = followed.mask, None
            with self._failing(number):
                for ahead, token in enumerate(tokens):
                    followed.matcher.accept(token, allowed=mask is not None and allows(mask[ahead], token))
            self._charge(number, followed, begun, tokens=0)

    def _fill(self, message: Fill) -> None:
        begun = time.process_time()
        bound: list[tuple[int, int]] = []
        masks: list[Bits] = []
        for number, drafts in message.wanted:
            followed = self._followed.get(number)
            if followed is None or not (followed.matcher.binds or drafts):
                continue
            since = time.process_time()
            followed.mask = np.empty((1 + len(drafts), self._words), dtype=np.int32)
            with self._failing(number):
                followed.matcher.fill(followed.mask, drafts)
                bound.append((number, len(followed.mask)))
                masks.append(followed.mask)
            self._charge(number, followed, since, tokens=len(followed.mask))
        failed, self._failed = tuple(self._failed), []
        matchers = [followed.matcher for followed in self._followed.values()]
        self._channel.send(
            Filled(
                tuple(bound),
                failed,
                sum(matcher.take_dead_end() for matcher in matchers),
                sum(matcher.take_broken() for matcher in matchers),
                time.process_time() - begun,
            ),
            b"".join(mask.tobytes() for mask in masks),
        )

    def _jump_forward(self, number: int, most: int) -> list[int]:
        followed = self._followed.get(number)
        if followed is None:
            return []
        begun, tokens = time.process_time(), []
        with self._failing(number):
            tokens = followed.matcher.jump_forward(most)
        self._charge(number, followed, begun, tokens=0)
        return tokens

    @contextmanager
    def _failing(self, number: int) -> Iterator[None]:
        """A sequence whose grammar the back end cannot follow any further is followed no longer."""
        try:
            yield
        except AutomatonFailed as failed:
            self._fail(number, str(failed))

    def _fail(self, number: int, error: str) -> None:
        self._followed.pop(number, None)
        self._failed.append((number, error))

    def _charge(self, number: int, followed: _FollowedSequence, begun: float, *, tokens: int) -> None:
        """What was done since `begun` is on the sequence's account; over its limit it is followed no longer."""
        spent = time.process_time() - begun
        followed.debt = max(0.0, followed.debt + spent - tokens * self._limits.step_seconds)
        if followed.debt > self._limits.burst_seconds and number in self._followed:
            self._fail(number, self._limits.too_slow_to_follow())


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Drops what libraries write beside their errors: xgrammar has a line for each character of an expression that it
    ignores, by which a request would push all else out of the rank's log."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def confine(limits: GrammarLimits, parent: int) -> None:
    """This process, forked by `parent`, ends with it, takes no more memory than `limits` allow, and is the first to go
    where the machine has none left."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + limits.memory, taken + limits.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_VICTIM)
