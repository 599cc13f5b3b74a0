"""The settings of a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from shared.config import ModelServiceConfig
from shared.settings import UpOption

if TYPE_CHECKING:  # it brings Jinja along, which `baton up` needs not
    from services.tokenizer.core.content_format import ContentFormat


class TokenizerConfig(ModelServiceConfig, frozen=True, kw_only=True):
    """Every setting of a tokenizer, with its unit and bounds."""

    chat_template: Annotated[
        str | None, Meta(description="File with a chat template, in place of the model's own.")
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        Meta(description="How the template expects a message's text: string, or openai (a list of parts)."),
    ] = "auto"
    score_template: Annotated[
        Path | None,
        Meta(
            description="File with a template of the prompt that scores a pair of texts: Jinja, as chat templates, "
            "with a message of the role query and one of the role document. Default: the tokenizer joins them."
        ),
        UpOption("Model"),
    ] = None
    infill_template: Annotated[
        str | None,
        Meta(
            description="How the model reads the text around a gap (`suffix`), e.g. "
            "<fim_suffix>{suffix}<fim_prefix>{prefix}<fim_middle>; default: as its vocabulary shows."
        ),
        UpOption("Model"),
    ] = None
    threads: Annotated[int, Meta(ge=1, le=64, description="Threads that encode long prompts.")] = 2

    def __post_init__(self) -> None:
        template = self.infill_template
        if template is not None and not template.count("{prefix}") == template.count("{suffix}") == 1:
            raise ValueError(f"infill_template = {template!r}: must have {{prefix}} and {{suffix}}, each once")

    def template_file(self) -> Path | None:
        """The template to use instead of the model's own; None: its own."""
        return Path(self.chat_template) if self.chat_template else None

    def content_format(self) -> ContentFormat | None:
        """What templates expect of a message's text; None: as each template shows."""
        return None if self.chat_template_content_format == "auto" else self.chat_template_content_format
