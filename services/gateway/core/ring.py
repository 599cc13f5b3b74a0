"""What the gateway knows of the others: which models there are, and whether the ring can serve."""

from __future__ import annotations

from shared.dialects import Dialect
from shared.ids import ModelName
from shared.messages.lifecycle import Lifecycle, ModelCard, Service
from shared.registry import Gone, Registry

NEEDED: tuple[Service, ...] = ("tokenizer", "coordinator", "scheduler", "detokenizer")
MODEL_MEMORY_S = 600.0
"""A model whose engines are all away is still known for so long: requests for it wait instead of failing."""


class Ring:
    """Owns the registry and the models' cards."""

    def __init__(self) -> None:
        self._registry = Registry()
        self._cards: dict[ModelName, tuple[ModelCard, float]] = {}
        self._dialects: dict[ModelName, Dialect] = {}
        """As tokenizers say; kept, as a card is."""
        self.missing: tuple[Service, ...] = NEEDED
        """The services of which none is ready; the ring serves when there are none such."""

    def heard(self, message: Lifecycle, now: float) -> Gone | None:
        if message.engine is not None:
            self._cards[message.engine.model.name] = (message.engine.model, now)
        if message.tokenizer is not None:
            self._dialects[message.tokenizer.model] = message.tokenizer.dialect
        gone = self._registry.heard(message, now)
        self._take_stock()
        return gone

    def expire(self, now: float) -> list[Gone]:
        """Forgets whoever was silent for too long, and answers with them."""
        old = [name for name, (_, heard) in self._cards.items() if now - heard > MODEL_MEMORY_S]
        for name in old:
            del self._cards[name]
            self._dialects.pop(name, None)
        gone = self._registry.expire(now)
        if gone:
            self._take_stock()
        return gone

    def _take_stock(self) -> None:
        ready = {message.service for message in self._registry.all(phase="ready")}
        self.missing = tuple(service for service in NEEDED if service not in ready)

    def models(self) -> list[ModelCard]:
        return [card for card, _ in self._cards.values()]

    def dialect(self, name: ModelName) -> Dialect:
        """What markup the model speaks; none as long as no tokenizer has said."""
        return self._dialects.get(name, Dialect())

    def model(self, name: ModelName) -> ModelCard | None:
        entry = self._cards.get(name)
        return entry[0] if entry else None
