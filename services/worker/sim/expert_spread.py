"""Experts spread over more ranks than an engine has: what each rank sends to experts and back in a mixture's layers.

The two modes are DeepEP's (https://github.com/deepseek-ai/DeepEP). A row goes out in fp8 with a float32 scale for each
128 elements, and comes back in bf16. With few rows a rank sends each straight to the rank of each of its experts; with
many, once to each node, where it goes on over the links between devices while more come.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

LOW_LATENCY_ROWS = 256
"""Rows of a rank up to which it sends them straight to their experts: what DeepEP advises."""
_SCALED = 128
"""Elements of a row that share a scale."""


class ExpertSpread(Struct, frozen=True, kw_only=True):
    """Over which ranks experts are spread, and how well."""

    ranks: int
    """Those of all engines that share the experts."""
    node_ranks: int = 8
    balance: float = 1.0
    """Mean of the ranks' picks by that of the busiest one, for which all wait."""
    overlap: bool = False
    """Whether a step is two halves, of which one is sent while the other is computed."""

    @property
    def nodes(self) -> int:
        """Of the ranks."""
        return -(-self.ranks // self.node_ranks)


class SentRows(NamedTuple):
    """What the busiest rank sends in a step."""

    networked: float
    """Bytes to other nodes."""
    linked: float
    """Bytes to other ranks of its node, or from its network card on to them."""
    messages: int
    """Times that all ranks wait for each other's rows, one after the other."""


def exchange(
    spread: ExpertSpread, *, rows: float, hidden: int, chosen: int, chosen_groups: int, layers: int
) -> SentRows:
    """Of `rows` rows of a rank with `hidden` elements, which go to `chosen` experts each, in `layers` layers.
    `chosen_groups`: those that a row's experts are of, if routing is limited to so many; a node has whole groups."""
    row = hidden + hidden / _SCALED * 4 + hidden * 2
    elsewhere = 1 - 1 / spread.nodes
    in_node = 1 - 1 / min(spread.ranks, spread.node_ranks)
    if rows <= LOW_LATENCY_ROWS:
        networked, linked = chosen * elsewhere, chosen * (1 - elsewhere) * in_node
    else:
        most = min(spread.nodes, chosen, chosen_groups)
        networked, linked = _distinct(most, chosen) * elsewhere, chosen * in_node
    sent = layers * rows * row / spread.balance
    return SentRows(networked * sent, linked * sent, 2 * layers)


def _distinct(nodes: int, chosen: int) -> float:
    """How many of `nodes` a row goes to, if each of its experts is on any of them alike."""
    return nodes * (1 - (1 - 1 / nodes) ** chosen)
