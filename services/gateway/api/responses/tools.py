"""The tools of a response as functions of a chat, and what is called by the client's names again.

Tools of a namespace have a joined name in the chat; custom tools, which take a text, are functions of one parameter.
A search of the web that is to bring nothing new, as Codex offers it, is left out: there is nothing that it could find.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from services.gateway.api.custom_tools.custom_input import custom_arguments, custom_parameters
from services.gateway.api.errors import check_depth, hosted_tool, invalid, not_allowed, unsupported

SEPARATOR = "__"
"""Between a namespace and the name of its tool, as in vLLM and Codex."""
ADDITIONAL = "additional_tools"
"""Type of an item that adds tools."""
_WEB_SEARCHES = ("web_search", "web_search_2025_08_26")
_FUNCTION_FIELDS = ("type", "name", "description", "parameters", "strict")
_CUSTOM_FIELDS = ("type", "name", "description", "format")
_NAMESPACE_FIELDS = ("type", "name", "description", "tools")

CallKind = Literal["function_call", "custom_tool_call"]


class CallTarget(NamedTuple):
    """What the client calls a function of the chat."""

    kind: CallKind
    name: str
    namespace: str | None = None


def chat_name(name: str, namespace: str | None) -> str:
    """Returns the name that a tool has in the chat."""
    return name if namespace is None else f"{namespace}{SEPARATOR}{name}"


def chat_tools(tools: list[dict[str, Any]], field: str = "tools") -> list[dict[str, Any]]:
    """Returns the tools of the chat. `field`: the client's name of them. Raises RequestError 400."""
    check_depth(field, tools)
    functions: list[dict[str, Any]] = []
    for i, tool in enumerate(tools):
        if tool.get("type") == "namespace":
            functions += _of_namespace(tool, f"{field}[{i}]")
        elif not _is_offline_search(tool):
            functions.append(_function(tool, f"{field}[{i}]", None))
    return functions


def offered_tools(tools: list[dict[str, Any]], items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools that the model has: checked ones of the request, and those that checked items of its input add;
    of two with a name the later one."""
    added = [tool for item in items if item.get("type") == ADDITIONAL for tool in item["tools"]]
    named: dict[Any, dict[str, Any]] = {}
    for tool in (*tools, *added):
        if not _is_offline_search(tool):
            key = tool["type"] == "namespace", tool.get("name")
            named.pop(key, None)
            named[key] = tool
    return [*named.values()] if added else [tool for tool in tools if not _is_offline_search(tool)]


def _is_offline_search(tool: dict[str, Any]) -> bool:
    return tool.get("type") in _WEB_SEARCHES and tool.get("external_web_access") is False


def call_targets(tools: Iterable[dict[str, Any]]) -> dict[str, CallTarget]:
    """Returns by the chat's names what checked tools are called, but for plain functions, which have the same name."""
    targets: dict[str, CallTarget] = {}
    for tool in tools:
        namespace = tool["name"] if tool["type"] == "namespace" else None
        for each in tool["tools"] if namespace is not None else [tool]:
            kind: CallKind = "custom_tool_call" if each["type"] == "custom" else "function_call"
            if namespace is not None or kind == "custom_tool_call":
                targets[chat_name(each["name"], namespace)] = CallTarget(kind, each["name"], namespace)
    return targets


def chat_tool_choice(choice: Any, tools: list[dict[str, Any]]) -> str | dict[str, Any] | None:
    """Returns the choice among the chat's tools; `tools`: the client's. Raises RequestError 400."""
    match choice:
        case None | str():
            return choice
        case {"type": "allowed_tools", "mode": mode, "tools": [*allowed]}:
            named = [_chosen(each, tools) for each in allowed]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case {"type": "function" | "custom", "name": str()}:
            return _chosen(choice, tools)
    forms = (
        '{"type": "function" or "custom", "name": …} or '
        '{"type": "allowed_tools", "mode": "auto" or "required", "tools": […]}'
    )
    raise not_allowed("tool_choice", choice, f"'none', 'auto', 'required', {forms} is")


def _chosen(choice: Any, tools: list[dict[str, Any]]) -> dict[str, Any]:
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            namespace = choice.get("namespace")
        case _:
            raise not_allowed("tool_choice.tools", choice, '{"type": "function" or "custom", "name": …} is')
    targets = call_targets(tools)
    joined = chat_name(name, namespace)
    if joined not in targets and namespace is None:
        within = [each for each, target in targets.items() if target.name == name and target.namespace is not None]
        plain = any(tool.get("name") == name for tool in tools)
        joined = within[0] if len(within) == 1 and not plain else joined
    return {"type": "function", "name": joined}


def _of_namespace(tool: dict[str, Any], path: str) -> list[dict[str, Any]]:
    _check_fields(tool, _NAMESPACE_FIELDS, path)
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise not_allowed(f"{path}.name", name, "the name of the namespace is")
    if not isinstance(tools, list) or not tools or not all(isinstance(each, dict) for each in tools):
        raise not_allowed(f"{path}.tools", tools, "a list of at least one function or custom tool is")
    return [_function(each, f"{path}.tools[{i}]", name) for i, each in enumerate(tools)]


def _function(tool: dict[str, Any], path: str, namespace: str | None) -> dict[str, Any]:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        if isinstance(kind, str):
            raise hosted_tool(f"{path}.type", kind)
        raise not_allowed(f"{path}.type", kind, "'function', 'custom' or 'namespace' is")
    _check_fields(tool, _FUNCTION_FIELDS if kind == "function" else _CUSTOM_FIELDS, path)
    function = {key: tool[key] for key in ("description", "parameters", "strict") if tool.get(key) is not None}
    if name is None:
        raise invalid(f"{path}.name", "this field is required")
    if not isinstance(name, str):
        raise not_allowed(f"{path}.name", name, "a text is")
    function["name"] = chat_name(name, namespace)
    if kind == "custom":
        function |= custom_parameters(tool.get("format"), f"{path}.format")
    return {"type": "function", "function": function}


def _check_fields(tool: dict[str, Any], known: tuple[str, ...], path: str) -> None:
    for name, value in tool.items():
        if name not in known and value is not None and (name, value) != ("defer_loading", False):
            raise unsupported(f"{path}.{name[:80]}", "this field of a tool")


def input_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a `function_call` or `custom_tool_call` of the client's input as a call of the chat. Raises RequestError
    400."""
    namespace = item.get("namespace")
    if namespace is not None and not isinstance(namespace, str):
        raise not_allowed(f"{where}.namespace", namespace, "a text is")
    match item:
        case {"type": "function_call", "call_id": str(call), "name": str(name), "arguments": str(arguments)}:
            pass
        case {"type": "custom_tool_call", "call_id": str(call), "name": str(name), "input": str(text)}:
            arguments = custom_arguments(text)
        case {"type": "custom_tool_call"}:
            form = '{"type": "custom_tool_call", "call_id": "…", "name": "…", "input": "…"} is'
            raise not_allowed(where, item, form)
        case _:
            form = '{"type": "function_call", "call_id": "…", "name": "…", "arguments": "…"} is'
            raise not_allowed(where, item, form)
    if not name:
        raise invalid(f"{where}.name", "an empty name is not allowed")
    function = {"name": chat_name(name, namespace), "arguments": arguments}
    return {"id": call, "type": "function", "function": function}
