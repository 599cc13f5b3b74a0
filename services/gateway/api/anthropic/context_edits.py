"""`context_management`: what is left out of a conversation before the model reads it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.anthropic.conversation import MessageFields
from services.gateway.api.anthropic.tool_clearing import CLEAR_TOOL_USES, ToolClearing, read_edit
from services.gateway.api.errors import invalid, not_allowed, unsupported

CLEAR_THINKING = "clear_thinking_20251015"
DEFAULT_KEPT_TURNS = 1
FIELD = "context_management.edits"


class ContextManagementFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Anthropic's `context_management`."""

    edits: list[dict[str, Any]] = []


class CheckedEdits(Struct, frozen=True):
    """The edits that a request asks for."""

    thinking: bool = False
    """Whether thoughts are to be cleared."""
    kept_turns: int | None = None
    """Of how many turns they stay; None: of all."""
    tools: ToolClearing | None = None

    def applied(self, turns: list[MessageFields], *, clear_tools: bool) -> list[MessageFields]:
        """Returns the turns without what is cleared; results of tools stay unless `clear_tools`."""
        if self.thinking and self.kept_turns is not None:
            turns = _without_thinking(turns, self.kept_turns)
        return turns if self.tools is None or not clear_tools else self.tools.cleared(turns)


def checked_edits(fields: ContextManagementFields | None) -> CheckedEdits:
    """Raises RequestError 400."""
    edits = CheckedEdits()
    for i, edit in enumerate([] if fields is None else fields.edits):
        where = f"{FIELD}[{i}]"
        match edit.get("type"):
            case "clear_thinking_20251015":
                if edits.thinking or edits.tools is not None:
                    raise invalid(f"{where}.type", f"{CLEAR_THINKING} is not allowed twice, nor behind other edits")
                if unknown := sorted(edit.keys() - {"type", "keep"}):
                    raise not_allowed(where, unknown[0], "'type' and 'keep' are")
                edits = replace(edits, thinking=True, kept_turns=_kept_turns(edit.get("keep"), f"{where}.keep"))
            case "clear_tool_uses_20250919":
                if edits.tools is not None:
                    raise invalid(f"{where}.type", f"{CLEAR_TOOL_USES} is not allowed twice")
                edits = replace(edits, tools=read_edit(edit, where))
            case str(kind):
                raise unsupported(f"{where}.type", f"{kind!r}")
            case kind:
                raise not_allowed(f"{where}.type", kind, f"'{CLEAR_THINKING}' or '{CLEAR_TOOL_USES}' is")
    return edits


def _kept_turns(keep: Any, where: str) -> int | None:
    """None: those of all turns."""
    match keep:
        case None:
            return DEFAULT_KEPT_TURNS
        case "all" | {"type": "all"}:
            return None
        case {"type": "thinking_turns", "value": int(value)} if value > 0 and value is not True:
            return value
    raise not_allowed(where, keep, '\'all\', {"type": "all"} or {"type": "thinking_turns", "value": 1 or more} is')


def _without_thinking(turns: list[MessageFields], kept: int) -> list[MessageFields]:
    """The turns with the thoughts of the last `kept` of the assistant's that have any. Calls of tools and their results
    are one turn of the assistant's, as it thinks on in between."""
    result: list[MessageFields] = []
    thoughtful, counted = 0, False
    for turn in reversed(turns):
        if turn.role == "assistant" and isinstance(turn.content, list):
            thinks = any(block.get("type") in _THOUGHTS for block in turn.content)
            if thinks and not counted:
                thoughtful, counted = thoughtful + 1, True
            if thinks and thoughtful > kept:
                turn = MessageFields(role=turn.role, content=_thoughtless(turn.content))
        elif turn.role not in ("assistant", "system") and not _is_tool_results(turn):
            counted = False
        result.append(turn)
    return result[::-1]


_THOUGHTS = ("thinking", "redacted_thinking")


def _thoughtless(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A turn of thoughts alone says nothing then, which is a text."""
    return [block for block in blocks if block.get("type") not in _THOUGHTS] or [{"type": "text", "text": ""}]


def _is_tool_results(turn: MessageFields) -> bool:
    return isinstance(turn.content, list) and all(block.get("type") == "tool_result" for block in turn.content)
