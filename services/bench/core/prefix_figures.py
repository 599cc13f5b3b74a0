"""How much a set of prompts repeats its beginnings: the figures, as the literature defines them.

- Ideal hit rate: prompt tokens that an earlier prompt began with, of all prompt tokens; what a prefix cache without
  limits reaches when prompts come in this order (SGLang: Zheng et al., NeurIPS 2024; "theoretical hit rate" of traces).
  In whole blocks as well, as engines with paged memory keep them.
- Shared tokens: those that any other prompt has too, the first one's own included (Preble: Srivatsa et al., ICLR 2025).
- Shared prefixes: the tree of all prompts is pruned below N visits; its leaves longer than L are the shared prefixes.
  Their share is that of the prompts that go through one; leaves lie apart, so none counts twice. Where many prompts
  leave a path before its leaf, the share of prompts that go through any remaining node longer than L says more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from services.bench.core.radix_tree import RadixTree, SharedPrefix
from services.bench.core.statistics import mean, percentile

PERCENTS = (10, 50, 90, 99)


class PrefixCount:
    """Owns the tree of all prompts so far, and what each of them repeated."""

    def __init__(self, block_size: int, max_stored: int) -> None:
        self.tree = RadixTree()
        self.repeated = array("Q")
        """Of each prompt: how many leading symbols an earlier one had."""
        self.symbols = self.in_blocks = self.forgotten = 0
        self._block_size, self._max_stored = block_size, max_stored

    def add(self, prompt: str) -> None:
        repeated = self.tree.insert(prompt)
        self.repeated.append(repeated)
        self.symbols += len(prompt)
        self.in_blocks += repeated - repeated % self._block_size
        if self.tree.stored > self._max_stored:
            self.forgotten += self.tree.forget()

    def figures(self, min_visits: int, min_length: int) -> tuple[dict[str, Any], list[SharedPrefix]]:
        """All of them, and the shared prefixes that some are about. Shares are of 1."""
        prefixes = self.tree.shared_prefixes(min_visits, min_length)
        figures = self._repetition() | self._sharing(prefixes)
        behind = self.tree.behind(min_visits, min_length) / max(1, len(self.repeated))
        return figures | {"min_visits": min_visits, "min_length": min_length, "behind_any_share": behind}, prefixes

    def _repetition(self) -> dict[str, Any]:
        prompts, symbols = max(1, len(self.repeated)), max(1, self.symbols)
        return {
            "prompts": len(self.repeated),
            "total_length": self.symbols,
            "mean_prompt_length": self.symbols / prompts,
            "ideal_hit_rate": sum(self.repeated) / symbols,
            "block_size": self._block_size,
            "ideal_hit_rate_in_blocks": self.in_blocks / symbols,
            "shared_share": self.tree.shared_symbols() / symbols,
            "repeated_beginning": distribution(self.repeated),
            "forgotten_prompts": self.forgotten,
        }

    def _sharing(self, prefixes: Sequence[SharedPrefix]) -> dict[str, Any]:
        prompts, symbols = max(1, len(self.repeated)), max(1, self.symbols)
        return {
            "shared_prefixes": len(prefixes),
            "prompt_share": sum(prefix.visits for prefix in prefixes) / prompts,
            "covered_share": sum(prefix.visits * prefix.length for prefix in prefixes) / symbols,
            "prefix_length": distribution([prefix.length for prefix in prefixes]),
            "prefix_visits": distribution([prefix.visits for prefix in prefixes]),
        }


def distribution(values: Sequence[int]) -> dict[str, float] | None:
    """None where there are no values."""
    if not values:
        return None
    middle = {f"p{percent}": percentile(values, percent) for percent in PERCENTS}
    return {"min": min(values), "mean": mean(values), **middle, "max": max(values)}
