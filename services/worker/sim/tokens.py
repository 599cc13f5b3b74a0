"""Which tokens a simulated model says: ordinary, printable ones, so that streams can be read and compared."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from services.worker.backend import BackendError
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer, special_ids

_MASK = 2**64 - 1


def printable_tokens(folder: Path, vocab_size: int) -> list[int]:
    """Ids below `vocab_size` that are no special tokens and decode to printable ASCII. Raises BackendError.

    Found once for a folder whose files stay as they are: of 128,000 words that takes 0.4 s, and a simulation asks
    several times."""
    files = ((each.name, each.stat()) for each in folder.iterdir() if each.is_file())
    state = frozenset((name, status.st_mtime_ns, status.st_size) for name, status in files)
    return list(_printable_tokens(folder, vocab_size, state))


@lru_cache(maxsize=4)
def _printable_tokens(folder: Path, vocab_size: int, state: frozenset[tuple[str, int, int]]) -> tuple[int, ...]:
    """`state`: of the folder's files; with another one they are read again."""
    try:
        tokenizer = load_tokenizer(folder).tokenizer
    except TokenizerUnusable as error:
        raise BackendError(str(error)) from None
    hidden = special_ids(tokenizer)
    ids = [i for i in range(min(vocab_size, tokenizer.get_vocab_size())) if i not in hidden]
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    printable = tuple(i for i, text in zip(ids, texts, strict=True) if text and text.isascii() and text.isprintable())
    if not printable:
        raise BackendError(f"{folder}: its vocabulary holds no printable token for a simulated model to say")
    return printable


def drawn(seed: int, position: int) -> int:
    """64 bits that depend on seed and output position only (SplitMix64: Steele, Lea, Flood, OOPSLA 2014)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


# Drafts that an imagined model accepts at a chosen rate. Which ones depends on seed and position only.


_OTHER_DRAWS = 0x5851F42D4C957F2D
"""Added to the seed, so that whether a draft is accepted has nothing to do with which token it is."""


class SimSpeculation(Struct, frozen=True):
    """How many tokens an imagined drafter drafts, and how often it is right."""

    most: int = 0
    """Drafts for one sequence and step."""
    acceptance: float = 0.7
    """Probability that a draft is accepted where all before it were."""

    def accepted(self, seed: int, position: int, drafts: int) -> int:
        """How many of the `drafts` from output position `position` on."""
        for count in range(drafts):
            if drawn(seed + _OTHER_DRAWS, position + count) >= self.acceptance * 2**64:
                return count
        return drafts
