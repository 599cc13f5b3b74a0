"""The edit `clear_tool_uses_20250919`: results of earlier calls of tools are left out of a conversation that has become
long."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from msgspec import Struct

from services.gateway.api.anthropic.conversation import MessageFields
from services.gateway.api.errors import not_allowed

CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEARED = "[cleared to save context]"
"""What stands in the place of a result."""
DEFAULT_TRIGGER = 100_000
DEFAULT_KEPT_USES = 3
_FIELDS = ("type", "trigger", "keep", "clear_at_least", "exclude_tools", "clear_tool_inputs")


class ToolClearing(Struct, frozen=True, kw_only=True):
    """One edit that clears results of tools, checked."""

    above_tokens: int | None = None
    """Tokens of the whole prompt above which it is applied."""
    above_uses: int | None = None
    """Calls above which it is applied; exactly one of both is set."""
    kept: int = DEFAULT_KEPT_USES
    """The last calls, whose results stay."""
    at_least: int = 0
    """Tokens that have to become free by it; else it is not applied."""
    excluded: frozenset[str] = frozenset()
    """Tools whose results stay."""
    inputs: bool | frozenset[str] = False
    """Whether the input of the calls goes, too, of all tools or of these."""

    def cleared_calls(self, turns: Sequence[MessageFields]) -> frozenset[str]:
        """Returns the ids of the calls whose results go, as far as that hangs on calls."""
        calls = [(block.get("id"), block.get("name")) for block in _blocks(turns, "tool_use")]
        if self.above_uses is not None and len(calls) <= self.above_uses:
            return frozenset()
        answered = {block.get("tool_use_id") for block in _blocks(turns, "tool_result")}
        earlier = calls[: max(0, len(calls) - self.kept)]
        return frozenset(str(id) for id, name in earlier if name not in self.excluded and id in answered)

    def cleared(self, turns: Sequence[MessageFields]) -> list[MessageFields]:
        """Returns the turns without these results."""
        calls = self.cleared_calls(turns)
        return [
            turn
            if isinstance(turn.content, str)
            else MessageFields(role=turn.role, content=[self._block(block, calls) for block in turn.content])
            for turn in turns
        ]

    def _block(self, block: dict[str, Any], calls: Collection[str]) -> dict[str, Any]:
        if block.get("type") == "tool_result" and block.get("tool_use_id") in calls:
            return {**block, "content": CLEARED}
        if block.get("type") == "tool_use" and block.get("id") in calls:
            gone = self.inputs if isinstance(self.inputs, bool) else block.get("name") in self.inputs
            return {**block, "input": {}} if gone else block
        return block


def read_edit(edit: dict[str, Any], where: str) -> ToolClearing:
    """Raises RequestError 400. `where`: the client's name of the edit."""
    if unknown := sorted(edit.keys() - set(_FIELDS)):
        raise not_allowed(where, unknown[0], f"{', '.join(_FIELDS)} are")
    above = {"input_tokens": DEFAULT_TRIGGER} if edit.get("trigger") is None else {}
    match edit.get("trigger"):
        case None:
            pass
        case {"type": "input_tokens" | "tool_uses" as kind, "value": int(value)} if _is_count(value, 1):
            above = {kind: value}
        case trigger:
            forms = '{"type": "input_tokens" or "tool_uses", "value": 1 or more} is'
            raise not_allowed(f"{where}.trigger", trigger, forms)
    return ToolClearing(
        above_tokens=above.get("input_tokens"),
        above_uses=above.get("tool_uses"),
        kept=_counted(edit, "keep", "tool_uses", DEFAULT_KEPT_USES, where),
        at_least=_counted(edit, "clear_at_least", "input_tokens", 0, where),
        excluded=_names(edit.get("exclude_tools"), f"{where}.exclude_tools"),
        inputs=_inputs(edit.get("clear_tool_inputs"), f"{where}.clear_tool_inputs"),
    )


def applied_edit(calls: int, tokens: int) -> dict[str, Any]:
    """Returns what an answer says of the edit: how many calls, and tokens, it has cleared."""
    return {"type": CLEAR_TOOL_USES, "cleared_tool_uses": calls, "cleared_input_tokens": tokens}


def _blocks(turns: Sequence[MessageFields], kind: str) -> list[dict[str, Any]]:
    blocks = [block for turn in turns if isinstance(turn.content, list) for block in turn.content]
    return [block for block in blocks if block.get("type") == kind]


def _counted(edit: dict[str, Any], name: str, kind: str, default: int, where: str) -> int:
    match edit.get(name):
        case None:
            return default
        case {"type": str(given), "value": int(value)} if given == kind and _is_count(value, 0):
            return value
        case other:
            raise not_allowed(f"{where}.{name}", other, f'{{"type": "{kind}", "value": 0 or more}} is')


def _is_count(value: int, least: int) -> bool:
    return value >= least and not isinstance(value, bool)


def _names(given: Any, where: str) -> frozenset[str]:
    if given is None:
        return frozenset()
    if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
        raise not_allowed(where, given, "a list of names of tools is")
    return frozenset(given)


def _inputs(given: Any, where: str) -> bool | frozenset[str]:
    return given if isinstance(given, bool) else _names(given, where)
