"""The items of a request's `input`, read as messages of a chat.

What a model writes in one turn is several items: reasoning, a text, calls of tools. A chat has one message for them.
"""

from __future__ import annotations

from typing import Any

from services.gateway.api.embeds.images import foreign_image, read_detail
from services.gateway.api.errors import abbreviated, invalid, not_allowed, unsupported
from services.gateway.api.responses.tools import ADDITIONAL, chat_tools, input_call

Item = dict[str, Any]
Message = dict[str, Any]

MAX_ITEMS = 16_384
ASKED = 0x8000
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    ADDITIONAL: "at",
}
STATUSES = ("in_progress", "completed", "incomplete")


def add_items(items: list[Item], field: str, turns: Turns) -> None:
    """Adds the messages that the items are. `field`: the client's name of them. Raises RequestError 400."""
    if len(items) > MAX_ITEMS:
        raise invalid(field, f"{len(items)} items are not allowed; at most {MAX_ITEMS}")
    for i, item in enumerate(items):
        _read(item, f"{field}[{i}]", turns)


def item_id(prefix: str, response: str, place: int) -> str:
    """Returns the id of the item that a response has at a place of its output, or, `ASKED` places behind, of its input.
    `response`: its id, or what that has in it."""
    return f"{prefix}_{response.removeprefix('resp_')}{place:04x}"


def numbered(given: str | list[Item], response: str) -> list[Item]:
    """Returns a checked input as it is stored: each item has an id, a type, a status, and parts for its content.
    `response`: what it is part of."""
    items: list[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given
    return [_numbered(item, response, ASKED + i) for i, item in enumerate(items)]


def _numbered(item: Item, response: str, place: int) -> Item:
    kind = item.get("type") or "message"
    named = {**item, "type": kind, "id": item.get("id") or item_id(_PREFIXES[kind], response, place)}
    named["status"] = item.get("status") or "completed"
    if kind == "message" and isinstance(text := item["content"], str):
        answered = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if answered else "input_text", "text": text}
        named["content"] = [{**part, "annotations": [], "logprobs": []} if answered else part]
    elif kind == "reasoning":
        named.setdefault("summary", [])
    return named


def is_unfinished(item: Item) -> bool:
    """Whether an item is a text of the model's that is to be continued."""
    return item.get("role") == "assistant" and item.get("status") in ("in_progress", "incomplete")


def is_developers(message: Message) -> bool:
    """Whether a message tells the model how to behave; one with images is as a user's."""
    return message["role"] == "developer" and isinstance(message["content"], str)


class Turns:
    """Owns the messages, and what the model's last turn has so far."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, message: Message) -> None:
        """A message of somebody else's."""
        self.messages.append(message)

    def reason(self, text: str) -> None:
        """Reasoning, with which a turn begins."""
        self._turn("reasoning_content", "content", "tool_calls")["reasoning_content"] = text

    def say(self, text: str) -> None:
        """A text of the model's."""
        turn = self._turn("" if self._called else "content")
        turn["content"] = (turn["content"] or "") + text

    def call(self, call: dict[str, Any]) -> None:
        """A call of a tool."""
        self._turn().setdefault("tool_calls", []).append(call)

    @property
    def _called(self) -> bool:
        """Whether the last turn calls tools: what the model says then belongs to it, as results follow the calls."""
        return bool(self.messages) and "tool_calls" in self.messages[-1]

    def _turn(self, *without: str) -> Message:
        """The model's last turn where it has none of these, else a new one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) is not None for name in without):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _read(item: Item, where: str, turns: Turns) -> None:
    if item.get("status") not in (None, *STATUSES):
        raise not_allowed(f"{where}.status", item["status"], f"one of {', '.join(STATUSES)} is")
    if not isinstance(item.get("id"), str | None):
        raise not_allowed(f"{where}.id", item["id"], "a text is")
    match item.get("type", "message"):
        case "message" | None:
            _read_message(item, where, turns)
        case "function_call" | "custom_tool_call":
            turns.call(input_call(item, where))
        case "function_call_output" | "custom_tool_call_output":
            turns.add(_call_output(item, where))
        case "reasoning":
            if text := _reasoning(item, where):
                turns.reason(text)
        case "additional_tools":
            _check_tools(item, where)
        case str(kind):
            raise unsupported(f"{where}.type", f"an item of type {abbreviated(kind)}")
        case other:
            raise not_allowed(f"{where}.type", other, "a string is")


def _read_message(item: Item, where: str, turns: Turns) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise not_allowed(f"{where}.role", role, "'user', 'assistant', 'system' or 'developer' is")
    if role == "assistant":
        turns.say(_text(content, f"{where}.content", "output_text"))
    else:
        turns.add({"role": role, "content": _content(content, f"{where}.content")})


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """What somebody else than the model says: a text, or parts where there are images among them."""
    if not isinstance(content, list) or not any(_is_image(part) for part in content):
        return _text(content, where, "input_text")
    return [
        _image(part, f"{where}[{i}]")
        if _is_image(part)
        else {"type": "text", "text": _part(part, f"{where}[{i}]", "input_text")}
        for i, part in enumerate(content)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise unsupported(f"{where}.file_id", "an image that is a file of the server's")
    max_side = read_detail(part.get("detail"), f"{where}.detail")
    if not isinstance(url := part.get("image_url"), str):
        raise not_allowed(f"{where}.image_url", url, "a data URI, or an address of an image, is")
    return foreign_image(f"{where}.image_url", url=url, max_side=max_side)


def _call_output(item: Item, where: str) -> Message:
    call = item.get("call_id")
    if not isinstance(call, str):
        raise not_allowed(f"{where}.call_id", call, "the call_id of a call is")
    return {"role": "tool", "tool_call_id": call, "content": _text(item.get("output"), f"{where}.output", "input_text")}


def _check_tools(item: Item, where: str) -> None:
    """Checks the tools that an item adds; `offered_tools` has them."""
    if item.get("role", "developer") != "developer":
        raise not_allowed(f"{where}.role", item["role"], "'developer' is")
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise not_allowed(f"{where}.tools", tools, "a list of tools is")
    chat_tools(tools, f"{where}.tools")


def _reasoning(item: Item, where: str) -> str:
    if item.get("encrypted_content") is not None:
        raise unsupported(f"{where}.encrypted_content", "reasoning that is not in the clear")
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if item.get(name):
            return _text(item[name], f"{where}.{name}", kind)
    return ""


def _text(content: Any, where: str, kind: str) -> str:
    """A text, or its parts; `kind`: what such parts are here."""
    match content:
        case str():
            return content
        case list() if kind != "input_text":
            return "".join(_part(part, f"{where}[{i}]", kind) for i, part in enumerate(content))
        case [_, *_]:
            return "\n".join(_part(part, f"{where}[{i}]", kind) for i, part in enumerate(content))
        case _:
            raise not_allowed(where, content, f"a text or a list of parts of type '{kind}' is")


def _part(part: Any, where: str, kind: str) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "reasoning_text" | "summary_text" | "text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(other)} if other != kind:
            raise unsupported(f"{where}.type", f"a part of type {abbreviated(other)} here")
        case _:
            raise not_allowed(where, part, f'{{"type": "{kind}", "text": "…"}} is')
