"""What an engine is for, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass

from shared.ids import NodeId
from shared.messages.kvstore import Owner
from shared.messages.lifecycle import Role


@dataclass(frozen=True, slots=True)
class Site:
    """Raises ValueError where a node is named, but not who leases there."""

    role: Role = "mixed"
    node: NodeId | None = None
    """Whose KV store is used; None: no store."""
    owner: Owner | None = None

    def __post_init__(self) -> None:
        if self.node is not None and self.owner is None:
            raise ValueError("a KV store is used in somebody's name")
