"""Which chat templates a model directory brings, by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.models.tokenizer_files import TokenizerFiles, TokenizerUnusable, read_json


def read_templates(files: TokenizerFiles, override: Path | None = None) -> dict[str, str]:
    """Template sources by name. `override`, a file, replaces all of the model's own. Raises TokenizerUnusable.

    Files of their own (`chat_template.jinja`, `additional_chat_templates/`) go before `tokenizer_config.json`, and
    that before the older `chat_template.json`, as in `transformers`.
    """
    if override is not None:
        return {"default": read_template(override)}
    found = dict(_template_files(files.folder))
    if found:
        return found
    return _named(files.settings.get("chat_template")) or _named(
        read_json(files.folder / "chat_template.json").get("chat_template")
    )


def _template_files(folder: Path) -> Iterator[tuple[str, str]]:
    if (folder / "chat_template.jinja").is_file():
        yield "default", read_template(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        yield path.stem, read_template(path)


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


def read_template(path: Path) -> str:
    """The text of one template's file. Raises TokenizerUnusable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerUnusable(f"{path}: {error}") from None
