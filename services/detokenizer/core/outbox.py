"""What goes to each gateway: gathered over one batch of tokens, one numbered message for each."""

from __future__ import annotations

from typing import NamedTuple

from services.detokenizer.core.actions import Action, ToGateway
from shared.ids import DetokenizerId, GatewayId, Incarnation
from shared.messages.gateway import Delta, Deltas, PromptPart, StreamOpened


class _Gathered(NamedTuple):
    opened: list[StreamOpened]
    deltas: list[Delta]
    scored: list[PromptPart]


class Outbox:
    """Owns the number of the next message to each gateway, and what that message will hold."""

    def __init__(self, detokenizer: DetokenizerId, epoch: Incarnation) -> None:
        self._detokenizer = detokenizer
        self._epoch = epoch
        self._numbers: dict[GatewayId, int] = {}
        self._gathered: dict[GatewayId, _Gathered] = {}

    def opened(self, gateway: GatewayId, opened: StreamOpened) -> None:
        self._for(gateway).opened.append(opened)

    def add(self, gateway: GatewayId, delta: Delta) -> None:
        self._for(gateway).deltas.append(delta)

    def scored(self, gateway: GatewayId, part: PromptPart) -> None:
        self._for(gateway).scored.append(part)

    def _for(self, gateway: GatewayId) -> _Gathered:
        gathered = self._gathered.get(gateway)
        if gathered is None:
            gathered = self._gathered[gateway] = _Gathered([], [], [])
        return gathered

    def flush(self) -> list[Action]:
        """One message for each gateway that there is something for."""
        messages: list[Action] = []
        for gateway, (opened, deltas, scored) in self._gathered.items():
            number = self._numbers.get(gateway, 0)
            self._numbers[gateway] = number + 1
            message = Deltas(
                detokenizer=self._detokenizer,
                epoch=self._epoch,
                number=number,
                opened=tuple(opened),
                deltas=tuple(deltas),
                scored=tuple(scored),
            )
            messages.append(ToGateway(gateway, message))
        self._gathered.clear()
        return messages

    def forget(self, gateway: GatewayId) -> None:
        """The gateway is gone; one that starts anew under its name hears from number 0."""
        self._numbers.pop(gateway, None)
        self._gathered.pop(gateway, None)
