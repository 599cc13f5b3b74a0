"""What ranks of a host wait for while they have nothing to do. No torch."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class NotifierState(NamedTuple):
    """What a notifier shows."""

    changes: int
    """Becomes another number with each `notify`."""
    called: int
    """The greatest number that was called, modulo 2 ** 32."""


class HostNotifier(Protocol):
    """What ranks of a host that have nothing to do wait for, and a number that each shows the others."""

    def state(self) -> NotifierState:
        """What it shows now."""

    def notify(self, call: int | None = None) -> None:
        """Wakes whoever waits; with a number, that is called from now on unless a greater one is."""

    def wait(self, seen: int, seconds: float) -> None:
        """Returns when `changes` is no longer `seen`, or after so many seconds."""

    def show(self, shown: int) -> None:
        """This rank's number, of 64 bits, from now on."""

    def shown_by(self, rank: int) -> int:
        """Another rank's; 0 before the first."""
