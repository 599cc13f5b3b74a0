"""Which other clusters there are, what they can take, and which requests go there. Pure: time is an argument.

Seconds are those of the local bus's liveness clock, but for what clusters compare: that is the clock of the wall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import ClusterName, EngineId, GatewayId, Incarnation, LoraId, ModelName, relay_id, relay_of
from shared.messages.federation import ClusterStatus, ModelRoom
from shared.messages.generation import MAX_PROMPT_EMBEDS_BYTES
from shared.messages.tokenizer import (
    ChatPrompt,
    EmbedsPrompt,
    InfillPrompt,
    PairPrompt,
    TextPrompt,
    Tokenize,
    TokenPrompt,
    rows_bytes,
)
from shared.protocol import MIN_PROTOCOL, PROTOCOL, SpokenProtocols, incompatibility

STATUS_SECONDS = 1.0
"""Between two statuses of a gateway."""
CLUSTER_SILENCE = 3.0
"""Seconds without a status after which a gateway of another cluster counts as gone, and what it had is tried again."""
MAX_CLOCK_OFFSET = 1.0
"""Seconds, as between the hosts of a stack: a queue's order and a template's date go by the clock of the wall."""
CLOCK_SAMPLES = 8
MIN_CLOCK_SAMPLES = 3
"""Statuses before a clock is judged: one may have been late."""
PREFIX_BYTES = 1024
"""Of a prompt: requests that begin alike prefer the same cluster, which then has their beginning cached."""
FREE_SHARE = 0.5
"""A cluster is preferred for a prompt as long as its free share is at least so much of the freest one's."""
MAX_CLUSTERS = 64
"""Clusters that are remembered, refused ones included."""


class OwnCluster(NamedTuple):
    """What this gateway says of its own cluster."""

    name: ClusterName
    address: str
    gateway: GatewayId
    incarnation: Incarnation
    fingerprint: bytes
    """Of the model that it serves; empty: not compared."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a KV block."""


class Room(NamedTuple):
    """What the engines of one model would take."""

    free: int
    places: int
    loras: frozenset[LoraId] = frozenset()
    """The adapters that some of them serve."""


class ClusterEntry(NamedTuple):
    """One cluster, for people."""

    name: ClusterName
    address: str
    state: str
    """here, ready, drained, silent, or refused."""
    gateways: int
    rooms: Mapping[ModelName, Room]
    reason: str = ""
    """Why it is refused."""


@dataclass(slots=True)
class _RemoteGateway:
    incarnation: Incarnation
    heard_at: float
    delays: deque[float] = field(default_factory=lambda: deque(maxlen=CLOCK_SAMPLES))
    """From sending to hearing each of its last statuses, by the two clocks: never less than their difference."""


@dataclass(slots=True)
class _RemoteCluster:
    status: ClusterStatus
    gateways: dict[GatewayId, _RemoteGateway] = field(default_factory=dict)
    forwarded: dict[ModelName, int] = field(default_factory=dict)
    """Requests sent there since its last status."""
    full: bool = False
    """Whether it has refused a request, or was not reached, since then."""
    refusal: str | None = None

    def room(self, model: ModelName, lora: LoraId | None = None) -> Room | None:
        """None where it does not serve the model, or not with this adapter."""
        for each in self.status.models:
            if each.model == model and (lora is None or lora in each.loras):
                return Room(0 if self.full else each.room - self.forwarded.get(model, 0), each.places)
        return None


class RemoteClusters:
    """Owns what is known of the other clusters, whether this one is drained, and the room in it."""

    def __init__(self, own: OwnCluster, since: float) -> None:
        """`since`: Unix seconds of this gateway's start."""
        self.own = own
        self.drained = False
        self.switched = 0.0
        """Unix seconds of the word that `drained` is."""
        self._since = since
        self._rooms: dict[ModelName, Room] = {}
        self._clusters: dict[tuple[ClusterName, str], _RemoteCluster] = {}
        """By name and address, as two may have one name."""
        self._name_taken: str | None = None
        """The address of the cluster that had this one's name before; None: nobody has it."""

    # ---- what is heard

    def record_status(self, status: ClusterStatus, now: float, wall: float) -> list[EngineId]:
        """Takes what a gateway says of its cluster. Returns the relay that it replaces, if it was started anew."""
        if status.cluster == self.own.name and status.address == self.own.address:
            self._since = min(self._since, status.since)
            self.switch(status.drained, status.switched)
            return []
        key = (status.cluster, status.address)
        cluster = self._clusters.get(key)
        if cluster is None:
            if len(self._clusters) >= MAX_CLUSTERS:
                return []
            cluster = self._clusters[key] = _RemoteCluster(status)
        cluster.status, cluster.full = status, False
        cluster.forwarded.clear()
        former = cluster.gateways.get(status.gateway)
        if former is None or former.incarnation != status.incarnation:
            cluster.gateways[status.gateway] = _RemoteGateway(status.incarnation, now)
        gateway = cluster.gateways[status.gateway]
        gateway.heard_at = now
        gateway.delays.append(wall - status.sent)
        self._judge_all()
        replaced = former is not None and former is not gateway
        return [relay_id(status.cluster, status.gateway)] if replaced else []

    def switch(self, drained: bool, at: float) -> bool:
        """Takes the newest word on whether this cluster is drained, said at `at` (Unix seconds). Returns whether it is
        news."""
        if at <= self.switched:
            return False
        self.drained, self.switched = drained, at
        return True

    def record_rooms(self, rooms: Mapping[ModelName, Room]) -> None:
        """Takes what this cluster's own engines would take; models without a ready engine are left out."""
        self._rooms = dict(rooms)

    def expire(self, now: float) -> list[EngineId]:
        """Forgets gateways that were silent for too long, and returns what stood for them."""
        gone = []
        for key, cluster in list(self._clusters.items()):
            silent = [name for name, each in cluster.gateways.items() if now - each.heard_at > CLUSTER_SILENCE]
            for name in silent:
                del cluster.gateways[name]
                gone.append(relay_id(cluster.status.cluster, name))
            if silent and not cluster.gateways and cluster.refusal is not None:
                del self._clusters[key]
        if gone:
            self._judge_all()
        return gone

    def mark_full(self, name: ClusterName) -> None:
        """A cluster refused a request, or was not reached: nothing goes there until its next status."""
        for cluster in self._clusters.values():
            if cluster.status.cluster == name:
                cluster.full = True

    # ---- what follows

    def own_status(self, wall: float) -> ClusterStatus:
        """What this gateway says, once a second."""
        own = self.own
        models = tuple(
            ModelRoom(model, own.fingerprint, max(0, room.free), room.places, tuple(sorted(room.loras)))
            for model, room in self._rooms.items()
        )
        return ClusterStatus(
            cluster=own.name,
            address=own.address,
            gateway=own.gateway,
            incarnation=own.incarnation,
            since=self._since,
            sent=wall,
            models=models,
            drained=self.drained,
            switched=self.switched,
            min_protocol=MIN_PROTOCOL,
            protocol=PROTOCOL,
            block_size=self.own.block_size,
        )

    def refusal(self, name: ClusterName, address: str) -> str | None:
        """Why no request of that cluster is taken, for people; None where it may send some."""
        if self._name_taken is not None:
            return self._own_refusal()
        cluster = self._clusters.get((name, address))
        if cluster is None:
            return f"cluster {name} at {address} is not known to {self.own.name}"
        return cluster.refusal

    def serves(self, model: ModelName) -> bool:
        """Whether engines of this cluster take requests for `model`, now or when others have ended."""
        return model in self._rooms

    def destination(self, tokenize: Tokenize, avoid: Sequence[EngineId]) -> ClusterName | None:
        """The cluster that a request goes to; None: it is served here. The nearest that has room: this one, then the
        others. Where none has, it waits here, or where engines are. Images with more rows than a message has stay."""
        own = self._rooms.get(tokenize.model)
        if own is not None and not self.drained and own.free > 0:
            self._rooms[tokenize.model] = own._replace(free=own.free - 1)
            return None
        if rows_bytes(tokenize.prompt) > MAX_PROMPT_EMBEDS_BYTES:
            return None
        found = self._choose(tokenize, avoid, with_room=True)
        if found is None and (own is None or self.drained):
            found = self._choose(tokenize, avoid, with_room=False)
        if found is not None:
            found.forwarded[tokenize.model] = found.forwarded.get(tokenize.model, 0) + 1
            return found.status.cluster
        return None

    def has_room(self, model: ModelName, lora: LoraId | None = None) -> bool:
        """Whether another cluster has room for a request, which is for this adapter."""
        return any(room.free > 0 for _, room in self._serving(model, lora))

    def can_serve(self, model: ModelName) -> bool:
        """Whether another cluster has engines for `model`."""
        return bool(self._serving(model))

    def listing(self) -> list[ClusterEntry]:
        """This cluster, then all others by name, refused ones included."""
        own = self.own
        state = "refused" if self._name_taken is not None else "drained" if self.drained else "here"
        entries = [ClusterEntry(own.name, own.address, state, 1, dict(self._rooms), self._own_refusal() or "")]
        for (name, address), cluster in sorted(self._clusters.items()):
            state = "silent" if not cluster.gateways else "drained" if cluster.status.drained else "ready"
            rooms = {each.model: Room(each.room, each.places) for each in cluster.status.models}
            reason = cluster.refusal or ""
            entry = ClusterEntry(name, address, "refused" if reason else state, len(cluster.gateways), rooms, reason)
            entries.append(entry)
        return entries

    # ---- parts

    def _serving(self, model: ModelName, lora: LoraId | None = None) -> list[tuple[_RemoteCluster, Room]]:
        if self._name_taken is not None:
            return []
        return [
            (cluster, room)
            for cluster in self._clusters.values()
            if cluster.gateways
            and cluster.refusal is None
            and not cluster.status.drained
            and (room := cluster.room(model, lora)) is not None
        ]

    def _choose(self, tokenize: Tokenize, avoid: Sequence[EngineId], *, with_room: bool) -> _RemoteCluster | None:
        """Rendezvous hashing of the prompt's beginning, with bounded loads (Thaler, Ravishankar 1998; Mirrokni, Thorup,
        Zadimoghaddam 2016)."""
        found = self._serving(tokenize.model, tokenize.lora)
        found = [each for each in found if not with_room or each[1].free > 0]
        avoided = {relay[0] for engine in avoid if (relay := relay_of(engine)) is not None}
        found = [each for each in found if each[0].status.cluster not in avoided] or ([] if with_room else found)
        if not found:
            return None
        shares = [room.free / max(1, room.places) for _, room in found]
        bound = FREE_SHARE * max(shares)
        free = [cluster for (cluster, _), share in zip(found, shares, strict=True) if share >= bound]
        beginning = _beginning(tokenize)
        return max(free or [each[0] for each in found], key=lambda each: _score(beginning, each.status.cluster))

    def _judge_all(self) -> None:
        """Says of each cluster whether it may take part. All judge by the same rules, so both sides of a pair that does
        not fit refuse each other."""
        taken = [
            each
            for each in self._clusters.values()
            if each.gateways
            and each.status.cluster == self.own.name
            and (each.status.since, each.status.address) < (self._since, self.own.address)
        ]
        self._name_taken = taken[0].status.address if taken else None
        for cluster in self._clusters.values():
            cluster.refusal = self._why_refused(cluster)

    def _why_refused(self, cluster: _RemoteCluster) -> str | None:
        status = cluster.status
        first = min(
            (
                each.status
                for each in self._clusters.values()
                if each.gateways and each.status.cluster == status.cluster
            ),
            key=lambda each: (each.since, each.address),
            default=status,
        )
        if status.cluster == self.own.name:
            return f"this cluster, at {self.own.address}, has the name {status.cluster}, too; give another --cluster"
        if first.address != status.address:
            return f"the cluster at {first.address} has the name {status.cluster}, too; give another --cluster"
        why = incompatibility(SpokenProtocols(status.min_protocol, status.protocol))
        if why is not None:
            return why
        if status.block_size != (ours := self.own.block_size):
            return f"its blocks hold {status.block_size} tokens, those here {ours}; one size for a federation"
        return self._model_refusal(status) or _clock_refusal(cluster)

    def _model_refusal(self, status: ClusterStatus) -> str | None:
        for each in status.models:
            ours = self.own.fingerprint
            if each.model in self._rooms and ours and each.fingerprint and each.fingerprint != ours:
                return (
                    f"model {each.model}: its files have the fingerprint {each.fingerprint.hex()[:12]}, those here "
                    f"{ours.hex()[:12]}, or one is simulated; another model needs another --served-model-name"
                )
        return None

    def _own_refusal(self) -> str | None:
        if self._name_taken is None:
            return None
        return f"the cluster at {self._name_taken} has the name {self.own.name}, too; give another --cluster"


def _clock_refusal(cluster: _RemoteCluster) -> str | None:
    """Statuses take time to come, so the one that took the least tells most."""
    for gateway in cluster.gateways.values():
        if len(gateway.delays) < MIN_CLOCK_SAMPLES:
            continue
        least = min(gateway.delays)
        if abs(least) > MAX_CLOCK_OFFSET:
            where = "behind" if least > 0 else "ahead"
            return (
                f"its clock is {abs(least):.1f} s {where}, at most {MAX_CLOCK_OFFSET:g} s are allowed; set both by NTP"
            )
    return None


def _beginning(tokenize: Tokenize) -> bytes:
    match tokenize.prompt:
        case ChatPrompt(messages=messages):
            return messages[:PREFIX_BYTES]
        case TextPrompt(text=text):
            return text[:PREFIX_BYTES].encode(errors="surrogatepass")
        case TokenPrompt(tokens=tokens):
            return tokens[:PREFIX_BYTES]
        case EmbedsPrompt(embeds=embeds):
            return embeds.rows[:PREFIX_BYTES]
        case InfillPrompt(prefix=prefix):
            return prefix[:PREFIX_BYTES].encode(errors="surrogatepass")
        case PairPrompt(text=text, second=second):
            return (text + second)[:PREFIX_BYTES].encode(errors="surrogatepass")


def _score(beginning: bytes, cluster: ClusterName) -> bytes:
    return blake2b(beginning, digest_size=8, key=cluster.encode()).digest()
