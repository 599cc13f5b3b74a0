"""Granite is a Llama whose embeddings, scores, residual branches and logits are scaled by numbers of its config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from torch import Tensor

try:
    from baton.services.worker.models.plugins.interface import Decoder, DecoderParts, ModelArchitecture, ModelConfig
except ModuleNotFoundError:  # a checkout
    from services.worker.models.plugins.interface import Decoder, DecoderParts, ModelArchitecture, ModelConfig


class Granite(ModelArchitecture):
    """`GraniteForCausalLM` of the transformers library."""

    base = "LlamaForCausalLM"

    def __init__(self, raw: Mapping[str, Any]) -> None:
        super().__init__(raw)
        self.residual = float(raw.get("residual_multiplier", 1.0))
        self.logits = float(raw.get("logits_scaling", 1.0))
        if self.logits <= 0:
            raise ValueError(f"logits_scaling {self.logits:g} is not positive")

    def config(self, config: ModelConfig) -> ModelConfig:
        """Embeddings and scores are scaled by what Baton knows already."""
        return replace(
            config,
            embedding_scale=float(self.raw.get("embedding_multiplier", 1.0)),
            attention_scale=float(self.raw.get("attention_multiplier", 1.0)),
        )

    def decoder(self, parts: DecoderParts) -> Decoder:
        """The rest is computed here."""
        return GraniteDecoder(parts, self.residual, self.logits)


class GraniteDecoder(Decoder):
    """Scales what joins the residual, and the logits."""

    def __init__(self, parts: DecoderParts, residual: float, logits: float) -> None:
        super().__init__(*parts)
        self._residual_multiplier = residual
        self._logits_scaling = logits

    def attend(self, *given: Any) -> Tensor:
        """[n, hidden] that joins the residual behind attention."""
        return super().attend(*given) * self._residual_multiplier

    def mlp_output(self, *given: Any) -> tuple[Tensor, Tensor]:
        """[n, hidden] that joins the residual behind the MLP, and the residual."""
        x, residual = super().mlp_output(*given)
        return x * self._residual_multiplier, residual

    def logits(self, x: Tensor) -> Tensor | None:
        """[n, vocab]"""
        logits = super().logits(x)
        return None if logits is None else logits / self._logits_scaling
