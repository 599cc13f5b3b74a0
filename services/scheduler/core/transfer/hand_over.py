"""Requests handed over to another engine: the saves that they wait for, their target, and which engines take any."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler.core.events import ForwardControl, HandOverRefused, SendHandOver, SendPrefetch
from services.scheduler.core.memory import BlockAllocator
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.transfer.saves import SaveOutcome, Saves
from services.scheduler.core.transfer.store_client import StoreClient
from shared.blocks import HASH_BYTES, BlockHash
from shared.ids import Attempt, DetokenizerId, EngineId, LeaseId, RequestId, SequenceId
from shared.messages.generation import Generation
from shared.messages.kvstore import Prefetch
from shared.messages.scheduler import Cancel, GenerateRequest, HandOver, StopMatched
from shared.packing import pack
from shared.reliability.recent import RecentEntries

MAX_REMEMBERED = 8192
"""The most handed-over requests, and engines that take none, that are remembered; the oldest are forgotten first. A
gateway that cancels a request soon learns where it is."""


@dataclass(slots=True)
class _HandOver:
    sequence: Sequence
    leases: set[LeaseId]
    """Leases of saves that are not over yet."""
    partial: BlockHash | None
    partial_leases: set[LeaseId]
    needed: frozenset[BlockHash] = frozenset()
    """What the decode engine loads."""
    good: bool = True


class SettledHandOver(NamedTuple):
    """A request whose saves are over. If it is not `good` blocks are missing in the store, so the request should stay
    on this engine."""

    sequence: Sequence
    partial: BlockHash | None
    good: bool


class HandOvers:
    """Owns the sequences of one epoch that wait for their saves before they are handed over."""

    def __init__(self, saves: Saves, memory: BlockAllocator) -> None:
        self.waiting: dict[SequenceId, _HandOver] = {}
        """The waiting hand-overs by sequence; only this class writes it."""
        self._saves = saves
        self._memory = memory

    def start(self, sequence: Sequence) -> None:
        """Saves all blocks that a fully planned sequence is decoded with at once, including the last, partial one."""
        if not self._saves.possible or not self._memory.keep_end(sequence):
            self.waiting[sequence.id] = _HandOver(sequence, set(), None, set(), good=False)
            return
        planned = sequence.tokens.planned
        full, rest = divmod(planned, sequence.tokens.block_size)
        partial = partial_hash(sequence.generation.request, sequence.generation.attempt) if rest else None
        needed = self._memory.needed(sequence, 0, planned, partial)
        behind = full * self._memory.tables
        leases = self._saves.save_now([each for each in needed if not rest or each.place < behind])
        partial_leases = set[LeaseId]()
        if rest:
            last = [each for each in needed if each.place >= behind]
            blocks = [self._memory.block_of(sequence, each) for each in last]
            partial_leases = self._saves.save_partial(last, rest, blocks)
        names = frozenset([each.hash for each in needed])
        self.waiting[sequence.id] = _HandOver(sequence, leases | partial_leases, partial, partial_leases, names)

    def record_save(self, save: SaveOutcome) -> None:
        """Records the end of a save for all sequences that wait for it."""
        for hand_over in self.waiting.values():
            if save.lease in hand_over.leases:
                hand_over.leases.remove(save.lease)
                hand_over.good = hand_over.good and save.good and hand_over.needed.isdisjoint(save.missing)

    def take_settled(self) -> list[SettledHandOver]:
        """Returns and forgets the hand-overs that are settled: all is saved and the token is known, or something could
        not be saved."""
        ready = [
            each
            for each in self.waiting.values()
            if not each.good or not (each.leases or each.sequence.tokens.in_flight)
        ]
        for each in ready:
            self.forget(each.sequence)
        return [SettledHandOver(each.sequence, each.partial, each.good) for each in ready]

    def forget(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended or stays. Its full blocks are saved all the same; its partial one is useless to
        others and is called off."""
        hand_over = self.waiting.pop(sequence.id, None)
        if hand_over is not None:
            for lease in hand_over.partial_leases & hand_over.leases:
                self._saves.call_off(lease)


@dataclass(slots=True)
class _SentRequest:
    attempt: Attempt
    engine: EngineId
    detokenizer: DetokenizerId
    wanted: bool = True
    comes_back: bool = False
    """Whether it is to be handed over to this engine later."""


class SentRequests:
    """Owns the destinations of recently handed-over requests, so that cancels that arrive here are forwarded. It
    outlives epochs."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._sent: RecentEntries[RequestId, _SentRequest] = RecentEntries(max_remembered)

    def add(
        self, generation: Generation, engine: EngineId, detokenizer: DetokenizerId, *, comes_back: bool = False
    ) -> None:
        """Records that the request is sent to `engine`; the oldest entry may be forgotten for it."""
        self._sent[generation.request] = _SentRequest(generation.attempt, engine, detokenizer, comes_back=comes_back)

    def forget(self, request: RequestId) -> None:
        """The request has come back, or was never sent."""
        self._sent.pop(request, None)

    def forward(self, message: Cancel | StopMatched) -> ForwardControl | None:
        """The message for the engine that has the request; None if it was not handed over. It is sent again for every
        cancel, as messages may be lost. If the request itself was lost on its way, the cancel names the detokenizer, so
        that its stream ends."""
        sent = self._sent.get(message.request)
        if sent is None or sent.attempt > message.attempt:
            return None
        if sent.comes_back and not sent.wanted:  # the other engine sends here what it is sent: not in a circle
            return None
        sent.wanted = False
        if isinstance(message, Cancel):
            message = Cancel(message.request, message.attempt, sent.detokenizer)
        return ForwardControl(sent.engine, message)

    def take_back(self, generation: Generation) -> bool:
        """Forgets a request that no engine took over. Returns whether its client still wants it."""
        sent = self._sent.get(generation.request)
        if sent is None or sent.attempt != generation.attempt:
            return False
        del self._sent[generation.request]
        return sent.wanted


class HandOverSender:
    """Owns which requests were sent where, and which engines take none at present. It outlives epochs."""

    def __init__(self, engine: EngineId, store: StoreClient) -> None:
        self._engine = engine
        self._store = store
        self._sent = SentRequests()
        self._away: RecentEntries[EngineId, None] = RecentEntries(MAX_REMEMBERED)

    def record_peer(self, engine: EngineId, *, takes: bool) -> None:
        """Records that another engine starts or stops taking requests over."""
        if takes:
            self._away.pop(engine, None)
        else:
            self._away[engine] = None

    def takes_over(self, engine: EngineId) -> bool:
        """Whether the engine takes requests over. True for an unknown engine."""
        return engine not in self._away

    def possible(self, engine: EngineId) -> bool:
        """Whether a request can be handed over to `engine` at present."""
        return self._store.attached and engine != self._engine and self.takes_over(engine)

    def prefetch(self, sequence: Sequence, memory: BlockAllocator) -> SendPrefetch | None:
        """Has the store of the node where the sequence will be decoded copy its blocks while they are computed, the
        partial one included; None where that is this node's store, or blocks cannot be saved."""
        node, tokens, layout = sequence.transfer.decode_node, sequence.tokens, self._store.layout
        if node is None or node == self._store.node or self._store.node is None or layout is None:
            return None
        if len(tokens.known) + 1 >= tokens.limit:  # its only token is drawn here
            return None
        partial = partial_hash(sequence.generation.request, sequence.generation.attempt)
        names = [each.hash for each in memory.needed(sequence, 0, len(tokens.known), partial)]
        return SendPrefetch(node, Prefetch(layout=layout, source=self._store.node, hashes=b"".join(names)))

    def send(self, settled: SettledHandOver) -> SendHandOver | None:
        """The message that hands the request over, with its tokens and its blocks' node. None if it stays here, because
        the engine is away or would have to compute what could not be saved."""
        sequence = settled.sequence
        engine = sequence.transfer.decode_on
        if not settled.good or engine is None or not self.takes_over(engine):
            self._store.counters.kept += 1
            return None
        self._store.counters.handed_over += 1
        over = HandOver(
            prefilled_by=self._engine,
            node=self._store.node,
            partial=settled.partial or b"",
            cached_tokens=sequence.stream.cached_tokens,
        )
        tokens, hashes = pack(sequence.tokens.known), b"".join(sequence.tokens.hashes)
        known = replace(sequence.generation, tokens=tokens, block_hashes=hashes)
        self._sent.add(sequence.generation, engine, sequence.detokenizer)
        return SendHandOver(engine, GenerateRequest(known, sequence.detokenizer, handed=over))

    def pass_on(self, sequence: Sequence) -> SendHandOver:
        """The message that has another engine compute the prompt, and hand the request over to this one."""
        transfer, generation = sequence.transfer, sequence.generation
        assert transfer.prefill_on is not None, "there is an engine to pass it on to"
        self._store.counters.passed_on += 1
        self._sent.add(generation, transfer.prefill_on, sequence.detokenizer, comes_back=True)
        generate = GenerateRequest(
            generation,
            sequence.detokenizer,
            decode_on=self._engine,
            decode_node=self._store.node,
            passed_by=self._engine,
        )
        return SendHandOver(transfer.prefill_on, generate)

    def forget(self, request: RequestId) -> None:
        """A request that was passed on has come back."""
        self._sent.forget(request)

    def take_back(self, event: HandOverRefused) -> bool:
        """The engine that a request was sent to is gone; whether the request is still wanted."""
        return self._sent.take_back(event.generate.generation)

    def forward(self, message: Cancel | StopMatched) -> ForwardControl | None:
        """What to send the engine that has the request by now, where it was handed over here."""
        return self._sent.forward(message)


def partial_hash(request: RequestId, attempt: Attempt) -> BlockHash:
    """The name of a block that is not full: of this attempt's, and of no other's."""
    return BlockHash(blake2b(f"partial {attempt} {request}".encode(), digest_size=HASH_BYTES).digest())
