"""Anthropic's turns of a conversation as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from services.gateway.api.anthropic.documents import document_text, plain_text, search_result_text
from services.gateway.api.embeds.images import foreign_image
from services.gateway.api.errors import invalid, not_allowed, unsupported
from services.gateway.api.media.source import IMAGE

BILLING = "x-anthropic-billing-header"
"""How a block of Claude Code's system prompt begins that is for Anthropic's servers only. It differs from request to
request, so that no prefix behind it would be found in the cache."""

_OF_USERS = ("user", "ctx", "msg")
"""Roles of what users say: Claude Code has two of its own, as vLLM knows, too."""
TOOL_REFERENCE = "Available: "
"""What the model is told of a tool that a result refers to, before the tool's name."""


TOOL_CHANGES = ("tool_addition", "tool_removal")
"""Types of blocks that say which tools there are from now on, and nothing that is read."""


class MessageFields(Struct, kw_only=True):
    """One turn of the conversation."""

    role: str
    content: str | list[dict[str, Any]]
    clear_at: str | None = None
    output_config: dict[str, Any] | None = None


Blocks = list[tuple[dict[str, Any], str]]
"""Each with its path in the body."""


def chat_messages(system: str | list[dict[str, Any]] | None, turns: Sequence[MessageFields]) -> list[dict[str, Any]]:
    """Returns the messages of a chat: the system prompt, then the turns. Turns of the role `system` belong to the
    system prompt, as in vLLM. Raises RequestError."""
    given = [] if system is None else [_system(system, "system")]
    messages: list[dict[str, Any]] = []
    last_user = max((i for i, turn in enumerate(turns) if turn.role in _OF_USERS), default=-1)
    for i, turn in enumerate(turns):
        if turn.role == "system":
            text = _system_turn(turn, f"messages[{i}]")
            if text is not None and not (turn.clear_at == "next_user_message" and i < last_user):
                given.append(text)
        else:
            for name in ("clear_at", "output_config"):
                if getattr(turn, name) not in (None, {}, "never"):
                    raise invalid(f"messages[{i}].{name}", "only allowed in a turn of the role 'system'")
            messages += _messages(turn, f"messages[{i}]")
    if not messages:
        raise invalid("messages", "at least one that is no system prompt is needed")
    return [{"role": "system", "content": "\n".join(given)}, *messages] if given else messages


def _system(given: str | list[dict[str, Any]], path: str) -> str:
    if isinstance(given, str):
        return given
    return _system_text([(block, f"{path}[{i}]") for i, block in enumerate(given)])


def _system_text(blocks: Blocks) -> str:
    texts = (plain_text(block, where) for block, where in blocks)
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _system_turn(turn: MessageFields, path: str) -> str | None:
    """What a turn of the role `system` says; None: it only changes the tools."""
    if turn.clear_at not in (None, "never", "next_user_message"):
        raise not_allowed(f"{path}.clear_at", turn.clear_at, "'never' or 'next_user_message' is")
    if turn.output_config:
        raise unsupported(f"{path}.output_config", "an output_config of one turn")
    if turn.content and isinstance(turn.content, list) and all(map(_changes_tools, turn.content)):
        return None
    if isinstance(turn.content, str):
        return turn.content
    named = [(block, f"{path}.content[{i}]") for i, block in enumerate(turn.content)]
    return _system_text([(block, where) for block, where in named if not _changes_tools(block)])


def _changes_tools(block: dict[str, Any]) -> bool:
    return block.get("type") in TOOL_CHANGES


def _messages(message: MessageFields, path: str) -> list[dict[str, Any]]:
    """A turn as messages of a chat: results of tools are messages of their own there, before what the user says; their
    images, which a tool cannot show there, are the user's."""
    role = "user" if message.role in _OF_USERS else message.role
    if role not in ("user", "assistant"):
        raise not_allowed(f"{path}.role", message.role, "'user' or 'assistant'; a system prompt goes into system")
    if isinstance(message.content, str):
        return [{"role": role, "content": message.content}]
    if not message.content:
        raise invalid(f"{path}.content", "[] is not allowed; a text or at least one block is needed")
    named = [(block, f"{path}.content[{i}]") for i, block in enumerate(message.content)]
    blocks = [(block, where) for block, where in named if not _changes_tools(block)]
    if not blocks:
        return []
    if role == "assistant":
        return [_assistant(blocks)]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block, where in blocks:
        if block.get("type") == "tool_result":
            result, images = _tool_result(block, where)
            results.append(result)
            parts += images
        else:
            parts.append(_part(block, where))
    if any(part["type"] == IMAGE.part for part in parts):
        return [*results, {"role": "user", "content": parts}]
    said = [{"role": "user", "content": "\n".join(part["text"] for part in parts)}] if parts else []
    return [*results, *said]


def _part(block: Any, where: str) -> dict[str, Any]:
    """A text, an image, or what has a text."""
    match block:
        case {"type": "image"}:
            return _image(block, where)
        case {"type": "document"}:
            text = document_text(block, where)
        case {"type": "search_result"}:
            text = search_result_text(block, where)
        case _:
            text = plain_text(block, where)
    return {"type": "text", "text": text}


def _result_part(block: Any, where: str) -> dict[str, Any]:
    """What a tool brings: a text, an image, or the name of a tool that may be called from now on."""
    match block:
        case {"type": "tool_reference", "tool_name": str(name)} if name:
            return {"type": "text", "text": f"{TOOL_REFERENCE}{name}"}
        case {"type": "tool_reference"}:
            raise not_allowed(where, block, '{"type": "tool_reference", "tool_name": "…"} is')
        case _:
            return _part(block, where)


def _assistant(blocks: Blocks) -> dict[str, Any]:
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, where in blocks:
        match block:
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "thinking"}:
                raise not_allowed(where, block, '{"type": "thinking", "thinking": "…"} is')
            case {"type": "redacted_thinking", "data": str(data)} if data:
                pass  # another server's, which alone can read it
            case {"type": "redacted_thinking"}:
                raise not_allowed(where, block, '{"type": "redacted_thinking", "data": "…"} is')
            case {"type": "tool_use", "id": str(call), "name": str(name), "input": dict(arguments)} if call and name:
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call, "type": "function", "function": function})
            case {"type": "tool_use"}:
                raise not_allowed(where, block, '{"type": "tool_use", "id": "…", "name": "…", "input": {…}} is')
            case _:
                texts.append(plain_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(block: dict[str, Any], where: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The tool's message, and the images that it brought."""
    call, content = block.get("tool_use_id"), block.get("content")
    if not isinstance(call, str) or not call or not isinstance(content, str | list | None):
        raise not_allowed(where, block, '{"type": "tool_result", "tool_use_id": "…", "content": "…"} is')
    parts: list[dict[str, Any]] = []
    if isinstance(content, list):
        parts = [_result_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    elif content is not None:
        parts = [{"type": "text", "text": content}]
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if block.get("is_error"):
        text = f"Error: {text}"
    images = [part for part in parts if part["type"] == IMAGE.part]
    return {"role": "tool", "tool_call_id": call, "content": text}, images


def _image(block: dict[str, Any], where: str) -> dict[str, Any]:
    match block.get("source"):
        case {"type": "base64", "media_type": str(kind), "data": str(data)}:
            if kind not in IMAGE.media_types:
                raise not_allowed(f"{where}.source.media_type", kind, f"{', '.join(IMAGE.media_types)} are")
            return foreign_image(f"{where}.source.data", encoded=data)
        case {"type": "url", "url": str(url)}:
            return foreign_image(f"{where}.source.url", url=url)
        case {"type": "file"}:
            raise unsupported(f"{where}.source.type", "an image that is a file of the server's")
        case source:
            forms = '{"type": "base64", "media_type": "image/png", "data": "…"} or {"type": "url", "url": "…"} is'
            raise not_allowed(f"{where}.source", source, forms)
