"""Requests that another engine goes on with: who waits for its blocks to be in the store, and who has gone."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler.core.events import Relay
from services.scheduler.core.kv_memory import Fresh, chain
from services.scheduler.core.saves import SaveOver, Saves
from services.scheduler.core.sequence import Sequence
from shared.blocks import BLOCK_SIZE, HASH_BYTES, BlockHash
from shared.ids import Attempt, DetokenizerId, EngineId, LeaseId, NodeId, RequestId, SequenceId
from shared.messages.generation import Generation
from shared.messages.scheduler import Cancel, Generate, HandOver, StopMatched
from shared.tokens import pack

REMEMBERED = 8192
"""Requests that were passed on; those longest ago are forgotten first. Who calls one off hears soon where it is."""


@dataclass(slots=True)
class _Handing:
    sequence: Sequence
    leases: set[LeaseId]
    """Saves that are not over yet."""
    partial: BlockHash | None
    partial_lease: LeaseId | None
    good: bool = True


class Settled(NamedTuple):
    """A request whose saves are over. Not `good`: blocks are missing in the store, so that it had better stay."""

    sequence: Sequence
    partial: BlockHash | None
    good: bool


class HandOvers:
    """Owns which saves each sequence waits for before it is handed over."""

    def __init__(self, saves: Saves) -> None:
        self._saves = saves
        self._handing: dict[SequenceId, _Handing] = {}

    def begin(self, sequence: Sequence) -> None:
        """All of its tokens are planned: their blocks go to the store at once, the last, partial one too."""
        if not self._saves.possible:
            self._handing[sequence.id] = _Handing(sequence, set(), None, None, good=False)
            return
        full, rest = divmod(sequence.planned, BLOCK_SIZE)
        leases = self._saves.save_now(chain(sequence.hashes, 0, full))
        partial = lease = None
        if rest:
            partial = partial_hash(sequence.generation.request, sequence.generation.attempt)
            parent = chain([*sequence.hashes[:full], partial], full, full + 1)[0].parent
            lease = self._saves.save_partial(Fresh(partial, parent), rest, sequence.blocks[full])
            leases.add(lease)
        self._handing[sequence.id] = _Handing(sequence, leases, partial, lease)

    def over(self, save: SaveOver) -> None:
        for handing in self._handing.values():
            if save.lease in handing.leases:
                handing.leases.remove(save.lease)
                handing.good = handing.good and save.good

    def settled(self) -> list[Settled]:
        """Those that go now: all is saved and the token is known; or something was not saved, so that they stay."""
        ready = [h for h in self._handing.values() if not h.good or not (h.leases or h.sequence.awaits_token)]
        for handing in ready:
            self.forget(handing.sequence)
        return [Settled(handing.sequence, handing.partial, handing.good) for handing in ready]

    def forget(self, sequence: Sequence) -> None:
        """It ended, or stays. Its full blocks are saved all the same; a partial one is of use to nobody else."""
        handing = self._handing.pop(sequence.id, None)
        if handing is not None and handing.partial_lease in handing.leases:
            self._saves.call_off(handing.partial_lease)

    def __bool__(self) -> bool:
        return bool(self._handing)


@dataclass(slots=True)
class _Gone:
    attempt: Attempt
    engine: EngineId
    detokenizer: DetokenizerId
    wanted: bool = True


class PassedOn:
    """Owns where the last requests went that were handed over, for whoever calls them off here. Outlives epochs."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._gone: OrderedDict[RequestId, _Gone] = OrderedDict()

    def add(self, generation: Generation, engine: EngineId, detokenizer: DetokenizerId) -> None:
        self._gone.pop(generation.request, None)
        self._gone[generation.request] = _Gone(generation.attempt, engine, detokenizer)
        if len(self._gone) > self._remembered:
            self._gone.popitem(last=False)

    def called_off(self, message: Cancel | StopMatched) -> Relay | None:
        """What to tell whoever has the request, where it is one of these: each time, as a word may be lost. Should the
        request never have come there, its stream has: a cancel says which."""
        gone = self._gone.get(message.request)
        if gone is None or gone.attempt > message.attempt:
            return None
        gone.wanted = False
        if isinstance(message, Cancel):
            message = Cancel(message.request, message.attempt, gone.detokenizer)
        return Relay(gone.engine, message)

    def came_back(self, generation: Generation) -> bool:
        """Nobody took it over; whether anybody still wants it."""
        gone = self._gone.get(generation.request)
        if gone is None or gone.attempt != generation.attempt:
            return False
        del self._gone[generation.request]
        return gone.wanted


class Peers:
    """Owns which other engines take nothing over at the moment."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._away: OrderedDict[EngineId, None] = OrderedDict()

    def changed(self, engine: EngineId, *, takes: bool) -> None:
        self._away.pop(engine, None)
        if not takes:
            self._away[engine] = None
        if len(self._away) > self._remembered:
            self._away.popitem(last=False)

    def take_over(self, engine: EngineId) -> bool:
        """Of an engine that nobody spoke of: yes."""
        return engine not in self._away


def partial_hash(request: RequestId, attempt: Attempt) -> BlockHash:
    """The name of a block that is not full: of this attempt's, and of no other's."""
    return BlockHash(blake2b(f"partial {attempt} {request}".encode(), digest_size=HASH_BYTES).digest())


def handed(settled: Settled, by: EngineId, node: NodeId | None) -> Generate:
    """What the engine that goes on is sent: the request with the token that was drawn, and where its blocks are."""
    sequence = settled.sequence
    over = HandOver(prefilled_by=by, node=node, partial=settled.partial or b"", cached_tokens=sequence.cached_tokens)
    known = replace(sequence.generation, tokens=pack(sequence.tokens), block_hashes=b"".join(sequence.hashes))
    return Generate(known, sequence.detokenizer, handed=over)
