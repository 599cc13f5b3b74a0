"""Texts to look for in what comes piece by piece."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Marks(NamedTuple):
    pattern: re.Pattern[str]
    """Any of them."""
    beginnings: frozenset[str]
    """Texts with which one of them begins."""
    longest: int
    """Characters of the longest beginning."""

    def begun(self, text: str) -> int:
        """How many characters at the end of the text may be the beginning of a mark; the most."""
        for length in range(min(len(text), self.longest), 0, -1):
            if text[-length:] in self.beginnings:
                return length
        return 0


@lru_cache(maxsize=256)
def marks_of(texts: tuple[str, ...]) -> Marks:
    beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
    pattern = re.compile("|".join(map(re.escape, texts)))
    return Marks(pattern, beginnings, max(map(len, texts)) - 1)
