"""A KV store for tests of the scheduler: slots that remember what was written, and leases that must all end."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import HASH_BYTES
from shared.ids import ArenaId, Incarnation, LeaseId
from shared.messages.kvstore import (
    NO_SLOT,
    Attach,
    AttachReply,
    Commit,
    CommitReply,
    Find,
    FindAny,
    FindAnyReply,
    FindReply,
    KvLayout,
    KvStoreRefusal,
    KvStoreReply,
    KvStoreRequest,
    LeaseOwner,
    Release,
    Reserve,
    ReserveReply,
)
from shared.messages.worker import Transfer
from shared.packing import pack, pack_generations, unpack, unpack_generations

LAYOUT = KvLayout(model="m", dtype="float32", layers=1, kv_heads=2, head_dim=4)
FINGERPRINT = "layout"

Key = tuple[LeaseOwner, LeaseId]


@dataclass
class Slot:
    """A block's place. Its contents are what a rank's memory held: a digest for each position."""

    generation: int = 0
    hash: bytes | None = None
    committed: bool = False
    contents: list[int | None] = field(default_factory=lambda: [None] * BLOCK_SIZE)


class HonestStore:
    """Answers at once; who asks decides when the answer arrives, if it does."""

    def __init__(self, slots: int = 64, lease_seconds: float = 1e6) -> None:
        self.incarnation = Incarnation(1)
        self.arena = ArenaId(1)
        self.slots = [Slot() for _ in range(slots)]
        self.pinned: dict[Key, list[int]] = {}
        self.reserved: dict[Key, list[int]] = {}
        self.serves = True
        self._lease_seconds = lease_seconds

    # ---- what the scheduler asks

    def answer(self, question: KvStoreRequest) -> KvStoreReply:
        if isinstance(question, Attach):
            attached = AttachReply(FINGERPRINT, self.arena, "a", len(self.slots), self._lease_seconds)
            return attached if self.serves else KvStoreRefusal("stopping")
        if not self.serves:
            return KvStoreRefusal("stopping")
        assert question.layout == FINGERPRINT
        key = (question.owner, question.lease)
        match question:
            case Find(hashes=hashes):
                return self._find(key, hashes)
            case FindAny(hashes=hashes):
                return FindAnyReply(bytes(self.place_of(hash_) is not None for hash_ in split(hashes)))
            case Reserve(hashes=hashes, parents=parents, tokens=tokens):
                assert len(hashes) == len(parents) == HASH_BYTES * len(tokens)
                return self._reserve(key, hashes)
            case Commit():
                return self._commit(key)

    def release(self, release: Release) -> None:
        key = (release.owner, release.lease)
        dropped = set(split(release.drop))
        for number in self.pinned.pop(key, []):
            slot = self.slots[number]
            if slot.hash in dropped and not self._pins(number):
                self._free(slot)
        for number in self.reserved.pop(key, []):
            self._free(self.slots[number])

    def _find(self, key: Key, hashes: bytes) -> FindReply:
        found: list[int] = []
        for hash_ in split(hashes):
            number = self.place_of(hash_)
            if number is None:
                break
            found.append(number)
        if found:
            self.pinned[key] = found
        return FindReply(arena=self.arena, slots=pack(found), generations=self._generations(found))

    def _reserve(self, key: Key, hashes: bytes) -> ReserveReply:
        granted: list[int] = []
        taken = {slot.hash for slot in self.slots if slot.hash is not None}
        for hash_ in split(hashes):
            free = next((n for n, slot in enumerate(self.slots) if slot.hash is None), None)
            if hash_ in taken or free is None:
                granted.append(NO_SLOT)
                continue
            self.slots[free] = Slot(self.slots[free].generation + 1, hash_)
            granted.append(free)
        self.reserved[key] = [number for number in granted if number != NO_SLOT]
        generations = self._generations(granted)
        return ReserveReply(arena=self.arena, slots=pack(granted), generations=generations)

    def _commit(self, key: Key) -> CommitReply:
        shown = 0
        for number in self.reserved.pop(key, []):
            slot = self.slots[number]
            if slot.contents[0] is None:  # not written yet
                self._free(slot)
            else:
                slot.committed = True
                shown += 1
        return CommitReply(shown)

    # ---- what the ranks see

    def slots_of(self, transfer: Transfer) -> list[Slot | None]:
        """None for a slot that is not what it was."""
        places = zip(unpack(transfer.slots), unpack_generations(transfer.generations), strict=True)
        slots = [self.slots[number] if self.slots[number].generation == gen else None for number, gen in places]
        return slots if transfer.arena == self.arena else [None] * len(slots)

    # ---- what happens to it

    def evict(self, number: int) -> None:
        """If it is not pinned."""
        slot = self.slots[number]
        if slot.committed and not self._pins(number):
            self._free(slot)

    def restart(self, *, other_file: bool) -> None:
        """What was committed is there again; leases are not."""
        self.incarnation = Incarnation(self.incarnation + 1)
        self.pinned.clear()
        self.reserved.clear()
        for slot in self.slots:
            if not slot.committed or other_file:
                self._free(slot)
        self.arena = ArenaId(self.arena + other_file)

    def expire(self) -> None:
        """Leases run out."""
        self.pinned.clear()
        for numbers in self.reserved.values():
            for number in numbers:
                self._free(self.slots[number])
        self.reserved.clear()

    def place_of(self, hash_: bytes) -> int | None:
        return next((n for n, slot in enumerate(self.slots) if slot.committed and slot.hash == hash_), None)

    @property
    def committed(self) -> int:
        return sum(slot.committed for slot in self.slots)

    def _pins(self, number: int) -> bool:
        return any(number in numbers for numbers in self.pinned.values())

    def _free(self, slot: Slot) -> None:
        slot.hash, slot.committed = None, False
        slot.generation += 1
        slot.contents = [None] * BLOCK_SIZE

    def _generations(self, numbers: list[int]) -> bytes:
        return pack_generations([0 if n == NO_SLOT else self.slots[n].generation for n in numbers])


def split(hashes: bytes) -> list[bytes]:
    return [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
