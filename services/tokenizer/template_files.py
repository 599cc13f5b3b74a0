"""Which chat templates a model directory brings, by name, and which one a request gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.content_format import ContentFormat
from services.tokenizer.dialect import dialect_of
from services.tokenizer.refusal import PromptRefused
from shared.tokenizer_files import TokenizerFiles, TokenizerUnusable, read_json


class ChatTemplates:
    """Owns the model's compiled templates. With several, the one named `tool_use` serves requests with tools."""

    def __init__(self, sources: Mapping[str, str], content_format: ContentFormat | None = None) -> None:
        try:
            self._by_name = {name: ChatTemplate(source, content_format) for name, source in sources.items()}
        except PromptRefused as error:
            raise TokenizerUnusable(f"the model's {error.message}") from None
        self.dialect = dialect_of(sources)

    def choose(self, name: str | None, *, tools: bool) -> ChatTemplate | None:
        """The template of that name, or the model's default. None where `name` is no name but a template's text."""
        if name is not None:
            return self._by_name.get(name)
        if tools and "tool_use" in self._by_name:
            return self._by_name["tool_use"]
        if "default" in self._by_name:
            return self._by_name["default"]
        raise PromptRefused("messages", f"this model has no {self._missing()}; use /v1/completions")

    def _missing(self) -> str:
        names = ", ".join(sorted(self._by_name))
        return f"default chat template, only {names}" if names else "chat template"


def read_templates(files: TokenizerFiles, override: Path | None = None) -> dict[str, str]:
    """Template sources by name. `override`, a file, stands in for all of the model's own. Raises TokenizerUnusable.

    Files of their own (`chat_template.jinja`, `additional_chat_templates/`) go before `tokenizer_config.json`, and
    that before the older `chat_template.json`, as in `transformers`.
    """
    if override is not None:
        return {"default": _text(override)}
    found = dict(_template_files(files.folder))
    if found:
        return found
    return _named(files.settings.get("chat_template")) or _named(
        read_json(files.folder / "chat_template.json").get("chat_template")
    )


def _template_files(folder: Path) -> Iterator[tuple[str, str]]:
    if (folder / "chat_template.jinja").is_file():
        yield "default", _text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield path.stem, _text(path)


def _named(value: Any) -> dict[str, str]:
    """A template as settings hold it: text, a list of {name, template}, or an object of names."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list() if all(isinstance(item, dict) and {"name", "template"} <= item.keys() for item in value):
            return {item["name"]: item["template"] for item in value}
        case dict() if all(isinstance(text, str) for text in value.values()):
            return value
        case _:
            raise TokenizerUnusable("chat_template: a string, or a list of {name, template}, is expected")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerUnusable(f"{path}: {error}") from None
