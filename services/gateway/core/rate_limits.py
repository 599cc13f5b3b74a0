"""How much each API key may still use, with what other gateways report of it. Pure: time is an argument, in seconds.

Requests and tokens per minute are token buckets that hold a minute's worth. Their level may fall below zero, by what
other gateways admitted at the same moment and by outputs that were longer than expected; it is paid back before the
next request is admitted. So over t minutes a key gets at most its limit × (t + 1), and one minute's worth more for each
further gateway (docs/adr/0024).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from services.gateway.core.api_keys import ApiKey, KeyName
from shared.ids import GatewayId, Incarnation
from shared.messages.gateway import KeyUsage, UsageReport

PEER_SILENCE = 3.0
"""Seconds without a report after which the open requests of another gateway no longer count."""
MAX_REPORTED = 500
"""Keys in one report; what does not fit goes into the next one."""
BUSY_RETRY = 1.0
"""Seconds after which a client may try again where too many of its requests are open: nobody knows when one ends."""

ROUNDING = 1e-6
"""Less than this is missing only because floating point is not exact."""

LimitName = Literal["requests per minute", "tokens per minute", "concurrent requests"]


class TokenBucket:
    """Owns how much of a rate is left: at most a minute's worth, and less than nothing where it was overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.capacity = per_minute
        self._level, self._at = float(per_minute), now

    def level(self, now: float) -> float:
        """What is left at `now`."""
        return min(float(self.capacity), self._level + self._filled(now))

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, also where less is left; a negative one is given back."""
        self._level, self._at = min(float(self.capacity), self.level(now) - amount), now

    def lower(self, level: float, now: float) -> None:
        """Leaves no more than `level`."""
        self._level, self._at = min(self.level(now), level), now

    def resize(self, per_minute: int, now: float) -> None:
        """Sets another rate; what was used stays used."""
        used = self.capacity - self.level(now)
        self.capacity = per_minute
        self._level, self._at = per_minute - used, now

    def seconds_until(self, level: float, now: float) -> float:
        """Seconds until so much is left; 0 where it is."""
        missing = level - self.level(now)
        return missing * 60 / self.capacity if missing > ROUNDING else 0.0

    def _filled(self, now: float) -> float:
        return max(0.0, now - self._at) * self.capacity / 60


class LimitExceeded(NamedTuple):
    """Why a key may not have what it asked for now."""

    name: LimitName
    allowed: int
    retry_after: float


class BucketState(NamedTuple):
    """One rate of a key, as OpenAI's headers show it."""

    limit: int
    remaining: int
    reset: float
    """Seconds until all of it is there again."""


class LimitState(NamedTuple):
    """What is left of a key's rates; None where there is no limit."""

    requests: BucketState | None
    tokens: BucketState | None
    open: int
    """Requests that are open at all gateways."""


class _KeyState:
    """One key's use: here, and of its buckets."""

    def __init__(self) -> None:
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.open = 0
        self.total_requests = 0
        self.total_tokens = 0

    def limit(self, key: ApiKey, now: float) -> None:
        """Applies the key's limits, which may have changed."""
        self.requests = _limited(self.requests, key.requests_per_minute, now)
        self.tokens = _limited(self.tokens, key.tokens_per_minute, now)

    def charge(self, requests: float, tokens: float, now: float) -> None:
        if self.requests is not None:
            self.requests.take(requests, now)
        if self.tokens is not None:
            self.tokens.take(tokens, now)

    def lower(self, usage: KeyUsage, age: float, now: float) -> None:
        """Leaves no more than another gateway had left `age` seconds ago."""
        for bucket, left in ((self.requests, usage.requests_left), (self.tokens, usage.tokens_left)):
            if bucket is not None and left is not None:
                bucket.lower(left + age * bucket.capacity / 60, now)


class _Peer:
    """What another gateway has reported since it started."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        self.heard = 0.0
        self.keys: dict[KeyName, tuple[KeyUsage, float]] = {}
        """The newest report of each key, and when it came."""


class RateLimits:
    """Owns what each limited key has used at this gateway, and what the others have reported."""

    def __init__(self, gateway: GatewayId, incarnation: Incarnation) -> None:
        self._gateway, self._incarnation = gateway, incarnation
        self._keys: dict[KeyName, _KeyState] = {}
        self._peers: dict[GatewayId, _Peer] = {}
        self._changed: dict[KeyName, None] = {}
        """Keys whose use the other gateways do not know yet, oldest change first."""

    def start(self, key: ApiKey, now: float) -> LimitExceeded | None:
        """Counts one more open request; or returns why there cannot be one now. To be ended by `finish`."""
        state = self._state(key, now)
        most = key.concurrent_requests
        if most is not None and self._open(key.name, state) >= most:
            return LimitExceeded("concurrent requests", most, BUSY_RETRY)
        if state.requests is not None and (wait := state.requests.seconds_until(1, now)) > 0:
            return LimitExceeded("requests per minute", state.requests.capacity, wait)
        state.open += 1
        state.total_requests += 1
        state.charge(1, 0, now)
        self._changed[key.name] = None
        return None

    def reserve(self, key: ApiKey, tokens: int, now: float) -> int | LimitExceeded:
        """Takes what an open request is expected to use, and returns how much that is: more than a minute's worth it
        need not wait for. Or returns why it cannot be had now."""
        state = self._state(key, now)
        if state.tokens is not None:
            tokens = min(tokens, state.tokens.capacity)
            if (wait := state.tokens.seconds_until(tokens, now)) > 0:
                return LimitExceeded("tokens per minute", state.tokens.capacity, wait)
        self._charge_tokens(key.name, state, tokens, now)
        return tokens

    def finish(self, key: ApiKey, reserved: int, used: int, now: float) -> None:
        """Ends an open request that used so many tokens of those `reserved`, or more."""
        state = self._state(key, now)
        state.open -= 1
        self._charge_tokens(key.name, state, used - reserved, now)

    def state(self, key: ApiKey, now: float) -> LimitState:
        """What is left of the key's limits."""
        state = self._state(key, now)
        return LimitState(_shown(state.requests, now), _shown(state.tokens, now), self._open(key.name, state))

    # ---- other gateways

    def report(self, now: float, *, everything: bool = False) -> UsageReport:
        """What the others should know: the keys whose use has changed since the last report, or all that are in
        use."""
        if everything:
            self._changed |= dict.fromkeys(name for name, state in self._keys.items() if _in_use(state, now))
        names = list(self._changed)[:MAX_REPORTED]
        for name in names:
            del self._changed[name]
        return UsageReport(
            gateway=self._gateway,
            incarnation=self._incarnation,
            keys=tuple(self._usage(name, self._keys[name], now) for name in names),
        )

    @property
    def changed(self) -> bool:
        """Whether there is something to report."""
        return bool(self._changed)

    def record_report(self, report: UsageReport, now: float) -> None:
        """Takes a gateway's report, its own included. A report that was lost is made good by the next one."""
        if report.gateway == self._gateway:
            return
        peer = self._peers.get(report.gateway)
        known = peer is not None and peer.incarnation == report.incarnation
        if peer is None or not known:
            peer = self._peers[report.gateway] = _Peer(report.incarnation)
        peer.heard = now
        for usage in report.keys:
            name = KeyName(usage.key)
            before = peer.keys.get(name)
            peer.keys[name] = usage, now
            if (state := self._keys.get(name)) is None:
                continue
            if known:
                requests, tokens = (before[0].requests, before[0].tokens) if before is not None else (0, 0)
                state.charge(usage.requests - requests, usage.tokens - tokens, now)
            else:  # what it had used before is in what it has left
                state.lower(usage, 0.0, now)

    def expire(self, now: float) -> None:
        """Forgets the gateways that have fallen silent."""
        for gateway in [name for name, peer in self._peers.items() if now - peer.heard > PEER_SILENCE]:
            del self._peers[gateway]

    # ---- parts

    def _state(self, key: ApiKey, now: float) -> _KeyState:
        state = self._keys.get(key.name)
        if state is not None:
            state.limit(key, now)
            return state
        state = self._keys[key.name] = _KeyState()
        state.limit(key, now)
        for peer in self._peers.values():
            if (found := peer.keys.get(key.name)) is not None:
                state.lower(found[0], now - found[1], now)
        return state

    def _open(self, name: KeyName, state: _KeyState) -> int:
        reports: Iterable[tuple[KeyUsage, float] | None] = (peer.keys.get(name) for peer in self._peers.values())
        return state.open + sum(found[0].open for found in reports if found is not None)

    def _charge_tokens(self, name: KeyName, state: _KeyState, tokens: int, now: float) -> None:
        state.total_tokens += tokens
        state.charge(0, tokens, now)
        self._changed[name] = None

    def _usage(self, name: KeyName, state: _KeyState, now: float) -> KeyUsage:
        return KeyUsage(
            key=name,
            requests=state.total_requests,
            tokens=state.total_tokens,
            open=state.open,
            requests_left=None if state.requests is None else state.requests.level(now),
            tokens_left=None if state.tokens is None else state.tokens.level(now),
        )


def _limited(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    if bucket.capacity != per_minute:
        bucket.resize(per_minute, now)
    return bucket


def _shown(bucket: TokenBucket | None, now: float) -> BucketState | None:
    if bucket is None:
        return None
    return BucketState(bucket.capacity, max(0, int(bucket.level(now))), bucket.seconds_until(bucket.capacity, now))


def _in_use(state: _KeyState, now: float) -> bool:
    buckets = (bucket for bucket in (state.requests, state.tokens) if bucket is not None)
    return state.open > 0 or any(bucket.level(now) < bucket.capacity for bucket in buckets)
