"""`tools`, `tool_choice` and `parallel_tool_calls`, checked."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, Protocol

from services.gateway.api.errors import invalid, shown
from services.gateway.api.reading import check_depth

MAX_TOOLS = 256
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class Tool(NamedTuple):
    name: str
    parameters: dict[str, Any]
    """The arguments' JSON schema; an object's."""
    strict: bool
    """The client wants arguments that fit the schema, whoever chose the tool."""


class Offer(NamedTuple):
    """What the model may call."""

    tools: tuple[Tool, ...]
    choice: Literal["auto", "required"]
    parallel: bool
    field: str
    """What the client asked for it by."""

    @property
    def schemas(self) -> dict[str, Any]:
        return {tool.name: tool.parameters for tool in self.tools}


class ToolFields(Protocol):
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


def read_offer(fields: ToolFields) -> Offer | None:
    """None where nothing is to be called. Raises ApiError 400."""
    tools = _tools(fields.tools or [])
    parallel = fields.parallel_tool_calls is not False
    match fields.tool_choice:
        case None | "auto":
            return Offer(tools, "auto", parallel, "tools") if tools else None
        case "none":
            return None
        case "required":
            if not tools:
                raise invalid("tool_choice", "'required' is not allowed without tools")
            return Offer(tools, "required", parallel, "tool_choice")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return Offer(_named(name, tools), "required", False, "tool_choice")
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
        }:
            return Offer(_allowed(allowed, tools), mode, parallel, "tool_choice")
        case _:
            forms = (
                "'none', 'auto', 'required', "
                '{"type": "function", "function": {"name": …}} or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
            )
            raise invalid("tool_choice", f"{shown(fields.tool_choice)} is not allowed; {forms} is")


def told_tools(fields: ToolFields) -> list[dict[str, Any]] | None:
    """The tools that the model is told of: none, those of `allowed_tools`, or all. For what `read_offer` let pass."""
    match fields.tool_choice:
        case "none":
            return None
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed]}}:
            kept = {tool.name for tool in _allowed(allowed, _tools(fields.tools or []))}
            return [tool for tool in fields.tools or [] if tool["function"]["name"] in kept]
        case _:
            return fields.tools


def _allowed(choices: list[Any], tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools that OpenAI's `allowed_tools` names, in the order of `tools`."""
    names = []
    for part in choices:
        match part:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                names += [tool.name for tool in _named(name, tools)]
            case _:
                known = '{"type": "function", "function": {"name": …}} is'
                raise invalid("tool_choice.allowed_tools.tools", f"{shown(part)} is not allowed; {known}")
    return tuple(tool for tool in tools if tool.name in names)


def _named(name: str, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    found = tuple(tool for tool in tools if tool.name == name)
    if not found:
        known = f"one of {shown([tool.name for tool in tools])[1:-1]} is" if tools else "there are no tools"
        raise invalid("tool_choice", f"{shown(name)} is not allowed; {known}")
    return found


def _tools(given: list[dict[str, Any]]) -> tuple[Tool, ...]:
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"{len(given)} tools are not allowed; at most {MAX_TOOLS}")
    check_depth("tools", given)
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise invalid(f"tools[{i}].function.name", f"{shown(tool.name)} is not allowed twice")
        names.add(tool.name)
    return tools


def _tool(tool: dict[str, Any], path: str) -> Tool:
    if tool.get("type") != "function":
        raise invalid(f"{path}.type", f"{shown(tool.get('type'))} is not allowed; 'function' is")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{path}.function", f"{shown(function)} is not allowed; an object with a name is")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(f"{path}.function.name", f"{shown(name)} is not allowed; 1 to 128 of a-z, A-Z, 0-9, _ . : / -")
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise invalid(f"{path}.function.strict", f"{shown(strict)} is not allowed; true or false")
    return Tool(name, _parameters(function.get("parameters"), f"{path}.function.parameters"), bool(strict))


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
SAYS_NOTHING = frozenset({"type", "properties", "required", "title", "description", "$schema"})


def _parameters(schema: Any, path: str) -> dict[str, Any]:
    """A schema that describes no parameter means that there is none, though JSON Schema would let any be there."""
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, dict):
        raise invalid(path, f"{shown(schema)} is not allowed; a JSON schema of an object is")
    if schema.get("type", "object") != "object":
        raise invalid(f"{path}.type", f"{shown(schema['type'])} is not allowed; 'object' is")
    if not isinstance(schema.get("properties", {}), dict):
        raise invalid(f"{path}.properties", f"{shown(schema['properties'])} is not allowed; an object is")
    if not schema.get("properties") and not schema.get("required") and SAYS_NOTHING.issuperset(schema):
        return NO_PARAMETERS
    return {"type": "object", **schema}
