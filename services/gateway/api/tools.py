"""`tools`, `tool_choice` and `parallel_tool_calls`, checked."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple, Protocol

from services.gateway.api.errors import abbreviated, check_depth, hosted_tool, invalid, not_allowed

MAX_TOOLS = 256
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class ToolDefinition(NamedTuple):
    """One tool that the client offers."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments; of type object."""
    strict: bool
    """Whether arguments must match the schema even where the model chose to call the tool."""


class ToolOptions(NamedTuple):
    """The tools that the model may call, and whether it has to."""

    tools: tuple[ToolDefinition, ...]
    choice: Literal["auto", "required"]
    parallel: bool
    field: str
    """The request's field that requires a tool call, or allows it."""

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments, by name."""
        return {tool.name: tool.parameters for tool in self.tools}


class ToolFields(Protocol):
    """The fields of a request that this module reads."""

    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None


def read_tool_options(fields: ToolFields) -> ToolOptions | None:
    """Returns None where no tool may be called. Raises RequestError 400."""
    tools = _tools(fields.tools or [])
    parallel = fields.parallel_tool_calls is not False
    match fields.tool_choice:
        case None | "auto":
            return ToolOptions(tools, "auto", parallel, "tools") if tools else None
        case "none":
            return None
        case "required":
            if not tools:
                raise invalid("tool_choice", "'required' is not allowed without tools")
            return ToolOptions(tools, "required", parallel, "tool_choice")
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ToolOptions(_named(name, tools), "required", False, "tool_choice")
        case {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [_, *_] as allowed},
        }:
            return ToolOptions(_allowed(allowed, tools), mode, parallel, "tool_choice")
        case _:
            forms = (
                "'none', 'auto', 'required', "
                '{"type": "function", "function": {"name": …}}, {"type": "custom", "custom": {"name": …}} or '
                '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
            )
            raise not_allowed("tool_choice", fields.tool_choice, f"{forms} is")


def template_tools(fields: ToolFields) -> list[dict[str, Any]] | None:
    """Returns the tools that the chat template shows to the model: none, those of `allowed_tools`, or all.

    The fields must have passed `read_tool_options`.
    """
    match fields.tool_choice:
        case "none":
            return None
        case {"type": "allowed_tools", "allowed_tools": {"tools": [*allowed]}}:
            kept = {tool.name for tool in _allowed(allowed, _tools(fields.tools or []))}
            return [tool for tool in fields.tools or [] if tool["function"]["name"] in kept]
        case _:
            return fields.tools


def _allowed(choices: list[Any], tools: tuple[ToolDefinition, ...]) -> tuple[ToolDefinition, ...]:
    """The tools that OpenAI's `allowed_tools` names, in the order of `tools`."""
    names = []
    for part in choices:
        match part:
            case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
                names += [tool.name for tool in _named(name, tools)]
            case _:
                known = '{"type": "function", "function": {"name": …}} is'
                raise not_allowed("tool_choice.allowed_tools.tools", part, known)
    return tuple(tool for tool in tools if tool.name in names)


def _named(name: str, tools: tuple[ToolDefinition, ...]) -> tuple[ToolDefinition, ...]:
    found = tuple(tool for tool in tools if tool.name == name)
    if not found:
        raise not_allowed(
            "tool_choice",
            name,
            f"one of {abbreviated([tool.name for tool in tools])[1:-1]} is" if tools else "there are no tools",
        )
    return found


def _tools(given: list[dict[str, Any]]) -> tuple[ToolDefinition, ...]:
    if len(given) > MAX_TOOLS:
        raise invalid("tools", f"{len(given)} tools are not allowed; at most {MAX_TOOLS}")
    check_depth("tools", given)
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in names:
            raise invalid(f"tools[{i}].function.name", f"{abbreviated(tool.name)} is not allowed twice")
        names.add(tool.name)
    return tools


def _tool(tool: dict[str, Any], path: str) -> ToolDefinition:
    if (kind := tool.get("type")) != "function":
        if isinstance(kind, str):
            raise hosted_tool(f"{path}.type", kind)
        raise not_allowed(f"{path}.type", kind, "'function' is")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise not_allowed(f"{path}.function", function, "an object with a name is")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise not_allowed(f"{path}.function.name", name, "1 to 128 of a-z, A-Z, 0-9, _ . : / -")
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise not_allowed(f"{path}.function.strict", strict, "true or false")
    return ToolDefinition(name, _parameters(function.get("parameters"), f"{path}.function.parameters"), bool(strict))


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
EMPTY_SCHEMA_KEYS = frozenset({"type", "properties", "required", "title", "description", "$schema"})


def _parameters(schema: Any, path: str) -> dict[str, Any]:
    """The schema of the arguments. One that describes no parameter means none, though JSON Schema would allow any."""
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, dict):
        raise not_allowed(path, schema, "a JSON schema of an object is")
    if schema.get("type", "object") != "object":
        raise not_allowed(f"{path}.type", schema["type"], "'object' is")
    if not isinstance(schema.get("properties", {}), dict):
        raise not_allowed(f"{path}.properties", schema["properties"], "an object is")
    if not schema.get("properties") and not schema.get("required") and EMPTY_SCHEMA_KEYS.issuperset(schema):
        return NO_PARAMETERS
    return {"type": "object", **schema}
