"""What the local supervisor hears: how many of a service there shall be. Asked by a coordinator's admin endpoint."""

from __future__ import annotations

from msgspec import Struct

from shared.ids import EngineId


class Scale(Struct, frozen=True, array_like=True, tag=True):
    """Answered by `Scaled` once the processes are started or told to drain."""

    service: str
    """gateway, tokenizer, detokenizer, coordinator, or a pool: engines, prefill, decode."""
    count: int


class Scaled(Struct, frozen=True, array_like=True, tag=True):
    started: tuple[str, ...]
    stopping: tuple[str, ...]


class ScaleRefused(Struct, frozen=True, array_like=True, tag=True):
    message: str


ScaleAnswer = Scaled | ScaleRefused


class EngineRanks(Struct, frozen=True, array_like=True):
    """One start of an engine's ranks."""

    engine: EngineId
    rendezvous: str
    """Host and port where they meet: another for each start."""


class RanksWanted(Struct, frozen=True, array_like=True):
    """What the first host runs; the others run their ranks of the same starts, and none of earlier ones."""

    engines: tuple[EngineRanks, ...]
    ending: bool = False
    """It stops, and so shall the others."""


class RanksHeld(Struct, frozen=True, array_like=True):
    """What one of the other hosts has started."""

    host: int
    running: tuple[EngineRanks, ...]
    lost: tuple[EngineRanks, ...]
    """A rank has ended: none of this start can go on."""
