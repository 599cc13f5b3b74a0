"""What a tokenizer's files say of it, as vLLM's `/tokenizer_info` shows it."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.models.tokenizer_files import TokenizerFiles

FILES = ("vocab_file", "merges_file")
"""Keys of paths, which are nobody's business."""
UNNAMED_CLASS = "PreTrainedTokenizerFast"


def tokenizer_info(files: TokenizerFiles, template: str | None) -> bytes:
    """A JSON object: `tokenizer_config.json`, tokens as their text, without paths. `template`: the chat template that
    chats are rendered by; None: there is none."""
    settings = {key: value for key, value in files.settings.items() if key not in FILES}
    shown = {**files.special_tokens, **_texts(settings), "tokenizer_class": _class_of(settings)}
    shown.pop("chat_template", None)
    return msgspec.json.encode(shown if template is None else {**shown, "chat_template": template})


def _class_of(settings: dict[str, Any]) -> str:
    name = settings.get("tokenizer_class")
    return name if isinstance(name, str) else UNNAMED_CLASS


def _texts(value: Any) -> Any:
    match value:
        case {"content": str(content)}:
            return content
        case dict():
            return {key: _texts(each) for key, each in value.items()}
        case list():
            return [_texts(each) for each in value]
        case _:
            return value
