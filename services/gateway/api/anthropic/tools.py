"""Anthropic's tools as functions of a chat: those that are offered at a conversation's end.

A chat template shows one list of tools, at the beginning. Turns may change it: results of a search of tools, and blocks
that add or remove one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.api.anthropic.conversation import TOOL_CHANGES, MessageFields
from services.gateway.api.errors import abbreviated, check_depth, hosted_tool, invalid, not_allowed, unsupported


class _Offer(Struct):
    """A tool, and whether the model is shown it."""

    function: dict[str, Any]
    shown: bool


class _Offers:
    """Owns the tools in the order in which they came, and finds them by their names: a body may name thousands."""

    def __init__(self) -> None:
        self._all: list[_Offer] = []
        self._named: dict[str, list[_Offer]] = {}

    def add(self, tool: dict[str, Any], path: str, *, instead: bool = False) -> None:
        """One more tool; `instead` of those of its name. Raises RequestError 400."""
        function, deferred, name = _tool(tool, path), tool.get("defer_loading"), tool.get("name")
        if not isinstance(deferred, bool | None):
            raise not_allowed(f"{path}.defer_loading", deferred, "true or false is")
        offer = _Offer(function, not deferred)
        if isinstance(name, str):  # what else it may be is refused with the chat's tools
            if instead:
                self.show(name, False)
                self._named[name] = []
            self._named.setdefault(name, []).append(offer)
        self._all.append(offer)

    def show(self, name: str, shown: bool) -> bool:
        """Shows the tools of a name, or shows them no longer; False where there are none."""
        found = self._named.get(name, [])
        for each in found:
            each.shown = shown
        return bool(found)

    def functions(self) -> list[dict[str, Any]]:
        """Those that the model is shown."""
        return [each.function for each in self._all if each.shown]


def offered_functions(tools: list[dict[str, Any]], turns: Sequence[MessageFields]) -> list[dict[str, Any]]:
    """Returns the tools that the model is shown: those with `defer_loading` once a result refers to them or a block
    adds them, none that a later block has removed. `turns`: checked ones. Raises RequestError 400."""
    offers = _Offers()
    for i, tool in enumerate(tools):
        offers.add(tool, f"tools[{i}]")
    for i, turn in enumerate(turns):
        if isinstance(turn.content, list):
            for j, block in enumerate(turn.content):
                _change(offers, block, f"messages[{i}].content[{j}]")
    return offers.functions()


def _change(offers: _Offers, block: dict[str, Any], where: str) -> None:
    kind, tool = block.get("type"), block.get("tool")
    if kind == "tool_result":
        for name in _referenced(block):
            if not offers.show(name, True):
                raise not_allowed("messages", name, "tool_name of a tool_reference is the name of one of the tools")
    if kind not in TOOL_CHANGES:
        return
    match tool:
        case {"type": "tool_reference", "name": str(name)}:
            if not offers.show(name, kind == "tool_addition"):
                raise not_allowed(f"{where}.tool.name", name, "the name of one of the tools is")
        case {"type": "tool_definition", "definition": dict(definition)} if kind == "tool_addition":
            offers.add(definition, f"{where}.tool.definition", instead=True)
        case {"type": "mcp_tool_reference" | "mcp_toolset_reference" as other}:
            raise unsupported(f"{where}.tool.type", f"a tool of type {abbreviated(other)}, which a server would run,")
        case _:
            raise not_allowed(f"{where}.tool", tool, '{"type": "tool_reference", "name": "…"} is')


def _referenced(result: dict[str, Any]) -> Iterator[str]:
    """The tools that a result refers to."""
    content = result.get("content")
    for part in content if isinstance(content, list) else ():
        match part:
            case {"type": "tool_reference", "tool_name": str(name)}:
                yield name


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise hosted_tool(f"{path}.type", str(tool["type"]))
    if "input_schema" not in tool:
        raise invalid(f"{path}.input_schema", "this field is required")
    callers = tool.get("allowed_callers")
    if callers is not None and (not isinstance(callers, list) or "direct" not in callers):
        raise not_allowed(f"{path}.allowed_callers", callers, "a list with 'direct' is: no code is run here")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    if examples := tool.get("input_examples"):
        function["description"] = _with_examples(function.get("description"), examples, path)
    return {"type": "function", "function": function}


def _with_examples(description: Any, examples: Any, path: str) -> str:
    """A tool's description with examples of its input, of which chat templates know nothing."""
    if description is not None and not isinstance(description, str):
        raise not_allowed(f"{path}.description", description, "a text is")
    where = f"{path}.input_examples"
    if not isinstance(examples, list) or not all(isinstance(each, dict) for each in examples):
        raise not_allowed(where, examples, "a list of objects is")
    check_depth(where, examples)
    lines = [msgspec.json.encode(each).decode() for each in examples]
    return "\n".join([*([] if description is None else [description]), "Examples of input:", *lines])
