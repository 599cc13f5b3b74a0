"""What the gateway knows of the other services: which models are served, and whether requests can be."""

from __future__ import annotations

from shared.ids import ModelName
from shared.messages.dialects import Dialect
from shared.messages.lifecycle import Lifecycle, ModelCard, Service
from shared.registry import InstanceGone, Registry

REQUIRED_SERVICES: tuple[Service, ...] = ("tokenizer", "coordinator", "scheduler", "detokenizer")
MODEL_MEMORY_S = 600.0
"""Seconds that a model stays known after its last engine's last heartbeat: requests for it wait instead of failing."""


class ClusterView:
    """Owns the registry of instances and the models' cards."""

    def __init__(self) -> None:
        self._registry = Registry()
        self._cards: dict[ModelName, tuple[ModelCard, float]] = {}
        self._dialects: dict[ModelName, Dialect] = {}
        """The dialect of each model, from its tokenizers' lifecycles; kept as long as the model's card."""
        self.missing: tuple[Service, ...] = REQUIRED_SERVICES
        """The services without a ready instance; requests can be served when it is empty."""

    def record_lifecycle(self, message: Lifecycle, now: float) -> InstanceGone | None:
        """Takes an instance's lifecycle message. Returns the instance that it ends or replaces, if any."""
        if message.engine is not None:
            self._cards[message.engine.model.name] = (message.engine.model, now)
        if message.tokenizer is not None:
            self._dialects[message.tokenizer.model] = message.tokenizer.dialect
        gone = self._registry.record_lifecycle(message, now)
        self._update_missing()
        return gone

    def expire(self, now: float) -> list[InstanceGone]:
        """Forgets instances that were silent for too long, and returns them."""
        old = [name for name, (_, heard) in self._cards.items() if now - heard > MODEL_MEMORY_S]
        for name in old:
            del self._cards[name]
            self._dialects.pop(name, None)
        gone = self._registry.expire(now)
        if gone:
            self._update_missing()
        return gone

    def _update_missing(self) -> None:
        ready = {message.service for message in self._registry.all(phase="ready")}
        self.missing = tuple(service for service in REQUIRED_SERVICES if service not in ready)

    def models(self) -> list[ModelCard]:
        """Returns the cards of all known models."""
        return [card for card, _ in self._cards.values()]

    def dialect(self, name: ModelName) -> Dialect:
        """Returns in which formats the model writes tool calls and reasoning; none until a tokenizer has reported
        them."""
        return self._dialects.get(name, Dialect())

    def model(self, name: ModelName) -> ModelCard | None:
        """Returns a model's card; None where it is unknown."""
        entry = self._cards.get(name)
        return entry[0] if entry else None
