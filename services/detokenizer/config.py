"""What a detokenizer is told at its start."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from services.detokenizer.core.detokenizer import MAX_STREAMS
from shared.config import ServiceConfig
from shared.ids import ModelName


class DetokenizerConfig(ServiceConfig, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, description="Model directory, or a Hugging Face repository.")]
    served_model_name: Annotated[str | None, Meta(description="Name that clients use; the model's unless given.")] = (
        None
    )
    max_streams: Annotated[
        int, Meta(ge=1, description="Requests held at a time; those above are failed, to be tried elsewhere.")
    ] = MAX_STREAMS

    def model_name(self) -> ModelName:
        return ModelName(self.served_model_name or self.model)
