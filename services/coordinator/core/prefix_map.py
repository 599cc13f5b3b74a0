"""Which sources hold which block, as far as their events showed: hash → set of sources. Bounded; knows no engines.

A set of sources is an integer, one bit each, so that a walk along a request's blocks narrows all sources down at once
by one AND a block: 256 blocks take about 20 µs, however many the sources. It is a walk and no bisection on purpose: an
engine evicts leaves before their parents as a rule, but not where two sequences computed the same blocks side by
side, and a bisection would believe in runs that are not there.

Of a hash only 60 bits are kept, as Python's integers are a third larger from there on. Two of a million blocks share
them with a chance of 1 in 2 million; then a prediction is wrong, and nothing else: engines find blocks by whole hashes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shared.blocks import HASH_BYTES

MAX_SHARED_SETS = 65_536
"""Different sets of which one copy is kept for all blocks; beyond it copies are made again."""


class PrefixRun(NamedTuple):
    """The sources that hold exactly the first `length` blocks, and not the next one."""

    sources: int
    length: int


_LOW_BITS = bytes(value & 0x0F for value in range(256))


def keys_of(hashes: bytes) -> Sequence[int]:
    """60 bits of each packed hash; whatever is no whole hash is left out."""
    packed = bytearray(hashes[: len(hashes) // HASH_BYTES * HASH_BYTES])
    packed[7::HASH_BYTES] = packed[7::HASH_BYTES].translate(_LOW_BITS)
    words = array("Q")
    words.frombytes(packed)
    return words[::2]


class PrefixMap:
    """Owns the map. A source is a bit from `open` to `retire`.

    At most `limit` blocks, half of them young. When the young half is full it becomes the old one, and the old one is
    forgotten; a block that is looked up or stored again is young again. So the least recently used blocks are
    forgotten. A chain whose beginning is forgotten counts as not cached until that is stored again.
    """

    def __init__(self, limit: int) -> None:
        self._half = max(1, limit // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._condemned: dict[int, int] = {}
        """Forgotten; emptied bit by bit, as freeing a million entries at once takes a while."""
        self._sets: dict[int, int] = {}
        self._free: list[int] = []
        self._bits = 0
        self._used = 0
        """Bits that blocks' sets may contain."""
        self._retired = 0
        self._sweeping = 0
        self._unswept: list[int] = []
        self.forgotten = 0
        """Blocks, since the start, that the limit cost."""

    def __len__(self) -> int:
        """Blocks in the map, retired sources' ones included until they are swept."""
        return len(self._young) + len(self._old)

    def open(self) -> int:
        """A new source's bit, with nothing held."""
        if self._free:
            return self._free.pop()
        self._bits += 1
        return 1 << (self._bits - 1)

    def retire(self, bit: int) -> None:
        """The source is gone. Its bit stays in the blocks until `tidy` removes it; until then do not ask for this
        source."""
        if bit & self._used:
            self._retired |= bit
        else:
            self._free.append(bit)

    def add(self, bit: int, keys: Sequence[int]) -> None:
        """The source holds these blocks, too."""
        if keys:
            self._used |= bit
        young, old, shared = self._young, self._old, self._shared
        for key in keys:
            mask = young.get(key)
            if mask is None:
                young[key] = shared(old.pop(key, 0) | bit)
            elif not mask & bit:
                young[key] = shared(mask | bit)
        self._age(2 * len(keys))

    def remove(self, bit: int, keys: Iterable[int]) -> None:
        """The source holds these blocks no more."""
        for key in keys:
            self._take_off(bit, key)

    def runs(self, sources: int, keys: Sequence[int]) -> list[PrefixRun]:
        """How far each of `sources` holds the chain, from its start; those that lack the first block are left out."""
        runs: list[PrefixRun] = []
        left, length, last = sources, 0, -1
        for length, mask in enumerate(map(self._young.get, keys)):
            if mask is last:  # as along most of a prompt: blocks with equal sources share one copy of their mask
                continue
            if mask is None:
                mask = self._rejuvenate(keys[length])
            last = mask
            if left & mask != left:
                runs.append(PrefixRun(left & ~mask, length))
                left &= mask
                if not left:
                    break
        else:
            runs.append(PrefixRun(left, len(keys)))
        self._age(len(keys))
        return [run for run in runs if run.sources and run.length]

    def holders(self, keys: Iterable[int]) -> int:
        """The sources that hold all of these blocks. That somebody looks makes no block young."""
        held = -1
        for key in keys:
            held &= self._young.get(key) or self._old.get(key) or 0
            if not held:
                return 0
        return max(0, held)

    def tidy(self, steps: int) -> None:
        """Takes retired bits off at most `steps` blocks, and gives them out again once they are off all."""
        if not self._unswept and self._retired:
            self._sweeping, self._retired = self._retired, 0
            self._unswept = [*self._old, *self._young]
        for _ in range(min(steps, len(self._unswept))):
            self._take_off(self._sweeping, self._unswept.pop())
        if self._sweeping and not self._unswept:
            self._free += bits_of(self._sweeping)
            self._used &= ~self._sweeping
            self._sweeping = 0

    def _take_off(self, bits: int, key: int) -> None:
        half = self._young if key in self._young else self._old
        mask = half.get(key)
        if mask is None:
            return
        if left := mask & ~bits:
            half[key] = self._shared(left)
        else:
            del half[key]

    def _rejuvenate(self, key: int) -> int:
        mask = self._old.pop(key, None)
        if mask is None:
            return 0
        self._young[key] = mask
        return mask

    def _shared(self, mask: int) -> int:
        """The copy of `mask` that all blocks with these sources share: 36 bytes, and a million blocks."""
        if len(self._sets) > MAX_SHARED_SETS:
            self._sets.clear()
        return self._sets.setdefault(mask, mask)

    def _age(self, steps: int) -> None:
        condemned = self._condemned
        for _ in range(min(steps, len(condemned))):
            condemned.popitem()
        if len(self._young) >= self._half:
            self.forgotten += len(self._old)
            self._condemned, self._old, self._young = self._old, self._young, {}


def bits_of(mask: int) -> list[int]:
    """The single bits of `mask`."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low)
        mask ^= low
    return bits


_BINARY_DIGITS = bytes.maketrans(b"01", b"\0\1")


def flags_of(mask: int) -> bytes:
    """For each bit of `mask`, from the lowest on, whether it is set: 0 or 1. A thousand take some microseconds, where
    `bits_of` takes 200."""
    return f"{mask:b}"[::-1].encode().translate(_BINARY_DIGITS)
