"""What models with states are not combined with: each is an error when a rank starts."""

from __future__ import annotations

from services.worker.models.config import ModelConfig, ModelDescription, ModelError


def check_states(
    config: ModelDescription, *, device: str, stages: int, drafts: str | None, connector: bool, grouped: bool
) -> None:
    """`drafts`: the method of speculation. `grouped`: layers are to have tables in groups. Raises ModelError."""
    if not isinstance(config, ModelConfig) or config.states is None:
        return
    if drafts is not None and device != "cpu":
        raise ModelError(f"speculative {drafts}: {_kind(config)} takes no drafts on {device}")
    if drafts is not None and stages > 1:
        raise ModelError(f"speculative {drafts}: {_kind(config)} takes no drafts in several stages")
    if drafts in ("medusa", "eagle"):
        raise ModelError(f"speculative {drafts}: {_kind(config)} takes drafts by ngram or a draft model")
    if connector:
        raise ModelError(f"kv_connector: {_kind(config)} has states, which no connector is told of")
    if grouped:
        raise ModelError(f"hybrid_kv_cache on: {_kind(config)} has one block table, of the layers that attend")


def _kind(config: ModelConfig) -> str:
    assert config.states is not None, "it has states"
    return f"a model with {config.states.kind} ({config.architecture})"
