"""Messages to supervisors: how many of a service there shall be, and which ranks run on which host."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import EngineId


class Scale(Struct, frozen=True, array_like=True, tag=True):
    """Answered by `ScaleResult` once the processes are started or draining."""

    service: str
    """gateway, tokenizer, detokenizer, coordinator, or a pool: engines, prefill, decode."""
    count: int


class ScaleResult(Struct, frozen=True, array_like=True, tag=True):
    """What `Scale` led to: instances that were started, and those that drain and stop."""

    started: tuple[str, ...]
    stopping: tuple[str, ...]


class ScaleRefusal(Struct, frozen=True, array_like=True, tag=True):
    """Why the pool was left as it is, for the operator to read."""

    message: str


ScaleReply = ScaleResult | ScaleRefusal


class EngineRanks(Struct, frozen=True, array_like=True):
    """One start of an engine's ranks."""

    engine: EngineId
    rendezvous: str
    """Host and port where they meet: another for each start."""


class RankAssignment(Struct, frozen=True, array_like=True):
    """What the first host runs; the others run their ranks of the same starts, and none of earlier ones."""

    engines: tuple[EngineRanks, ...]
    ending: bool = False
    """The first host stops, and the others must stop, too."""


class RankStatus(Struct, frozen=True, array_like=True):
    """What one of the other hosts has started."""

    host: int
    running: tuple[EngineRanks, ...]
    lost: tuple[EngineRanks, ...]
    """A rank has ended: none of this start can go on."""
