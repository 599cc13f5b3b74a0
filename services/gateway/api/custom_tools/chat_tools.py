"""Custom tools of a chat, brought into the form of functions before anything else reads them."""

from __future__ import annotations

from typing import Any, Protocol

from services.gateway.api.custom_tools.custom_input import custom_arguments, custom_parameters
from services.gateway.api.errors import abbreviated, check_depth, invalid, not_allowed, unsupported
from services.gateway.api.tools import NAME

_FIELDS = ("name", "description", "format")


class CustomToolFields(Protocol):
    """The fields of a request that this module reads and writes."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None


def as_functions(fields: CustomToolFields) -> frozenset[str]:
    """Has custom tools, the calls of such in the history, and the choice of one be functions; returns the names of the
    tools. Raises RequestError 400."""
    fields.messages = messages_as_functions(fields.messages)
    fields.tools, names = tools_as_functions(fields.tools)
    fields.tool_choice = _choice(fields.tool_choice, names)
    return names


def tools_as_functions(tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, frozenset[str]]:
    """Returns the tools as functions, and the names of those that were custom. Raises RequestError 400."""
    if not tools or not any(tool.get("type") == "custom" for tool in tools):
        return tools, frozenset()
    check_depth("tools", tools)
    functions: list[dict[str, Any]] = []
    custom, names = set[str](), set[Any]()
    for i, tool in enumerate(tools):
        if tool.get("type") == "custom":
            tool = _function(tool.get("custom"), f"tools[{i}].custom")
            name: str = tool["function"]["name"]
            if name in names:
                raise invalid(f"tools[{i}].custom.name", f"{abbreviated(name)} is not allowed twice")
            custom.add(name)
        function = tool.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            names.add(function["name"])
        functions.append(tool)
    return functions, frozenset(custom)


def messages_as_functions(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages, where calls of custom tools are those of functions. Raises RequestError 400."""
    if not any(_calls_custom(message) for message in messages):
        return messages
    return [_message(message, f"messages[{i}].tool_calls") for i, message in enumerate(messages)]


def _calls_custom(message: dict[str, Any]) -> bool:
    calls = message.get("tool_calls")
    return isinstance(calls, list) and any(isinstance(call, dict) and call.get("type") == "custom" for call in calls)


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    if not _calls_custom(message):
        return message
    return {**message, "tool_calls": [_call(call, f"{where}[{i}]") for i, call in enumerate(message["tool_calls"])]}


def _call(call: Any, where: str) -> Any:
    match call:
        case {"type": "custom", "custom": {"name": str(name), "input": str(text)}}:
            function = {"name": name, "arguments": custom_arguments(text)}
            return {**{key: call[key] for key in call if key != "custom"}, "type": "function", "function": function}
        case {"type": "custom"}:
            raise not_allowed(f"{where}.custom", call.get("custom"), "name and input, both texts, are")
        case _:
            return call


def _function(custom: Any, path: str) -> dict[str, Any]:
    if not isinstance(custom, dict):
        raise not_allowed(path, custom, "an object with a name is")
    for name, value in custom.items():
        if name not in _FIELDS and value is not None:
            raise unsupported(f"{path}.{name[:80]}", "this field of a tool")
    name, described = custom.get("name"), custom.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise not_allowed(f"{path}.name", name, "1 to 128 of a-z, A-Z, 0-9, _ . : / -")
    if described is not None and not isinstance(described, str):
        raise not_allowed(f"{path}.description", described, "a text is")
    function = {"name": name} if described is None else {"name": name, "description": described}
    taken = custom_parameters(custom.get("format"), f"{path}.format", nested=True)
    return {"type": "function", "function": function | taken}


def _choice(choice: str | dict[str, Any] | None, names: frozenset[str]) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed]}}:
            named = [_chosen(each, names) for each in allowed]
            return {**choice, "allowed_tools": {**choice["allowed_tools"], "tools": named}}
        case _:
            chosen: dict[str, Any] = _chosen(choice, names)
            return chosen


def _chosen(choice: Any, names: frozenset[str]) -> Any:
    """One tool among those that may be called; what is no choice of a custom tool is returned as it is."""
    match choice:
        case {"type": "custom", "custom": {"name": str(name)}} | {"type": "custom", "name": str(name)}:
            if name not in names:
                allowed = f"one of {abbreviated(sorted(names))[1:-1]} is" if names else "there are no custom tools"
                raise not_allowed("tool_choice", name, allowed)
            return {"type": "function", "function": {"name": name}}
        case {"type": "custom"}:
            raise not_allowed("tool_choice", choice, '{"type": "custom", "custom": {"name": …}} is')
        case _:
            return choice
