"""What a tokenizer is told at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from services.tokenizer.content_format import ContentFormat
from shared.config import ServiceConfig
from shared.ids import ModelName


class TokenizerConfig(ServiceConfig, frozen=True, kw_only=True):
    model: Annotated[str, Meta(min_length=1, description="Model directory, or a Hugging Face repository.")]
    served_model_name: Annotated[str | None, Meta(description="Name that clients use; the model's unless given.")] = (
        None
    )
    chat_template: Annotated[str | None, Meta(description="File with a chat template to use instead.")] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="Whether the template wants a message's text as a string or as a list of parts."),
    ] = "auto"
    threads: Annotated[int, Meta(ge=1, le=64, description="Threads for long prompts.")] = 2

    def model_name(self) -> ModelName:
        return ModelName(self.served_model_name or self.model)

    def template_file(self) -> Path | None:
        return Path(self.chat_template) if self.chat_template else None

    def content_format(self) -> ContentFormat | None:
        """None: as the template shows."""
        return None if self.chat_template_content_format == "auto" else self.chat_template_content_format
