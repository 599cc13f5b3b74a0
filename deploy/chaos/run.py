"""Round after round: clients stream, a fault strikes, the stack recovers, and everything is checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from deploy.chaos.checks import StackWatch, stack_watch
from deploy.chaos.faults.fault import FailureKind, Fault
from deploy.chaos.load import POLL, Load, Stream, first_difference, waits
from deploy.chaos.schedule import Case, Strike, cases_of, strikes
from deploy.chaos.stack import SUPERVISOR, ChaosStack
from deploy.chaos.usage import ProcessUsage, grown, usage
from deploy.errors import CommandError

RECOVERY = 5.0
"""Seconds beyond a fault's deadline within which every stream is to go on."""
READY_DEADLINE = 120.0
REST_DEADLINE = 20.0
"""Seconds after the last stream's end within which nothing may be held any more: longer than the leases of the KV
store."""


class RoundResult(NamedTuple):
    """One fault, and what it did."""

    case: Case
    victim: str
    streams: tuple[Stream, ...]
    """Those that were open when it struck, or began after that."""
    altered: tuple[Stream, ...]
    """Those that ended with another text than without a fault."""
    lost: tuple[Stream, ...]
    """Those that failed in a way that this fault does not allow."""
    waits: tuple[float, ...]
    """Of each stream its longest time in seconds without a token from the strike on; see `load.waits`."""
    deadline: float
    """Seconds after which the product had to have noticed."""
    leaks: Mapping[str, int]
    """What was still held at the end."""
    unready: tuple[str, ...]
    """Processes that had not come back at the end."""
    bugs: int
    """Processes that ended by an exception which no code expected."""
    allowed: frozenset[FailureKind]
    complaints: tuple[str, ...] = ()
    """What the fault itself found wrong."""
    notes: tuple[str, ...] = ()
    """What else it has to say."""
    longest_pause: float = 0.0
    """Seconds between two tokens of any stream, from the strike on."""

    @property
    def equal(self) -> int:
        """Streams that ended with their text."""
        return sum(stream.failure is None for stream in self.streams) - len(self.altered)

    @property
    def errors(self) -> int:
        """Streams that ended with an error which this fault allows."""
        return sum(stream.failure is not None for stream in self.streams) - len(self.lost)

    @property
    def late(self) -> int:
        """Streams that waited for longer than the deadline and RECOVERY."""
        return sum(wait > self.deadline + RECOVERY for wait in self.waits)


class ChaosOptions(NamedTuple):
    """What is to be done to a stack."""

    seed: int
    duration: float
    """Seconds; the round that is under way then is finished."""
    clients: int
    tokens: int
    """Of each answer."""
    passes: int | None = None
    """Over all cases; None: as many as `duration` has room for, which counts for nothing otherwise."""


class ChaosRun:
    """Owns the load on one stack, and its faults' rounds."""

    def __init__(self, stack: ChaosStack, faults: Mapping[Fault, frozenset[str]], options: ChaosOptions) -> None:
        """`stack` runs already. `faults` with the targets that each is to strike, without any for all of them. Raises
        CommandError where a fault has no such target here."""
        self._stack, self._options = stack, options
        self._faults = {fault.name: fault for fault in faults}
        self.skipped = {name: why for name, fault in self._faults.items() if (why := fault.missing(stack))}
        """Faults that cannot be done here, and why."""
        self.cases = cases_of(
            {
                fault.name: _targets(fault, list(fault.targets(stack)), wanted)
                for fault, wanted in faults.items()
                if fault.name not in self.skipped
            }
        )
        self.usage: list[Mapping[str, ProcessUsage]] = []
        """Of each process, before the first round and after each."""
        self.broken: str | None = None
        """Why the run could not go on."""
        self._undisturbed: list[Stream] = []

    async def run(self, finished: Callable[[Strike, RoundResult], None]) -> list[RoundResult]:
        """All rounds; `finished` hears of each. Raises CommandError where the stack does not say the same twice before
        the first one."""
        state, options = self._stack.state, self._options
        load = Load(state.url, state.api_key, state.model, clients=options.clients, tokens=options.tokens)
        results = []
        try:
            async with stack_watch(state) as watch:
                await self._learn_texts(load)
                self.usage.append(usage(self._stack.state))
                for strike in self._strikes():
                    try:
                        result = await self._round(strike, load, watch)
                        self.usage.append(usage(self._stack.state))
                    except CommandError as error:
                        self.broken = f"{strike.case}: {error}"
                        break
                    results.append(result)
                    finished(strike, result)
                    if result.unready or self._stack.identity(SUPERVISOR) is None:
                        break  # what is struck from here on would not come back
        finally:
            load.close()
        return results

    @property
    def grown(self) -> Mapping[str, int]:
        """By how many bytes processes grew after the first pass over all cases, where that is too much."""
        first = len(self.cases)
        return grown(self.usage[first], self.usage[-1]) if len(self.usage) > first else {}

    def _strikes(self) -> Iterator[Strike]:
        end, passes = time.monotonic() + self._options.duration, self._options.passes
        for strike in strikes(self.cases, self._options.seed):
            if strike.number >= passes * len(self.cases) if passes is not None else time.monotonic() >= end:
                return
            yield strike

    async def _learn_texts(self, load: Load) -> None:
        self._undisturbed = await load.each_once("undisturbed")
        again = await load.each_once("undisturbed again")
        if difference := first_difference(self._undisturbed, again):
            raise CommandError(f"without any fault, two runs differ: {difference}")

    async def _round(self, strike: Strike, load: Load, watch: StackWatch) -> RoundResult:
        stack, fault = self._stack, self._faults[strike.case.fault]
        victim = strike.victim(fault.targets(stack)[strike.case.target])
        allowed, deadline, bugs = fault.allowed(stack, victim), fault.deadline(stack, victim), stack.bugs()
        over, begun = asyncio.Event(), time.perf_counter()
        clients = asyncio.create_task(load.run(over, f"round {strike.number}"))
        try:
            await _served(load, begun, clients)
            await asyncio.sleep(strike.delay)
            struck = time.perf_counter()
            try:
                async with fault.strike(stack, victim):
                    await asyncio.sleep(fault.hold)
            except CommandError as error:  # an operator's command that was refused
                stack.complaints.append(str(error))
            unready = await watch.until_ready(stack, READY_DEADLINE)
            await _served(load, struck, clients)
        finally:
            over.set()
        streams = tuple(stream for stream in await clients if stream.end > struck)
        leaks = await watch.until_at_rest(REST_DEADLINE)
        complaints, notes = tuple(stack.complaints), tuple(stack.notes)
        stack.complaints, stack.notes = [], []
        ended = [stream for stream in streams if stream.failure is None]
        return RoundResult(
            case=strike.case,
            victim=victim,
            streams=streams,
            altered=tuple(each for each in ended if each.text != self._undisturbed[each.prompt].text),
            lost=tuple(each for each in streams if each.failure is not None and each.failure not in allowed),
            waits=tuple(waits(streams, struck)),
            deadline=deadline,
            leaks=leaks,
            unready=tuple(unready),
            bugs=stack.bugs() - bugs,
            allowed=allowed,
            complaints=complaints,
            notes=notes,
            longest_pause=max((stream.longest_pause(struck) for stream in streams), default=0.0),
        )


def _targets(fault: Fault, found: list[str], wanted: frozenset[str]) -> list[str]:
    if unknown := wanted - set(found):
        raise CommandError(f"--faults {fault.name}:{min(unknown)}: its targets are {', '.join(found)}", status=2)
    return [target for target in found if target in wanted] if wanted else found


async def _served(load: Load, since: float, clients: asyncio.Task[list[Stream]]) -> None:
    """Returns once every client got a token of a request that began after `since`, or after READY_DEADLINE."""
    end = time.perf_counter() + READY_DEADLINE
    while not load.served_since(since) and not clients.done() and time.perf_counter() < end:
        await asyncio.sleep(POLL)
