"""The formats in which one model's outputs are read: built-in ones, or those of plug-ins, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from services.gateway.parsing.call_templates import CallTemplate
from shared.messages.dialects import (
    CHANNELS_OF_CALLS,
    CHANNELS_OF_REASONING,
    THINKING_MARKS,
    ReasoningFormat,
    ThinkingControl,
    ThinkingMarks,
)

Schemas = Mapping[str, Any]
"""The JSON schema of each function's arguments, by the function's name."""

NO_SCHEMAS: Schemas = MappingProxyType({})


class OutputDialect(NamedTuple):
    """The formats in which to read one model's outputs. It goes to processes that have not loaded the plug-ins, so it
    holds what of them is to be known there."""

    tools: str | None = None
    """A built-in format or a plug-in's name; None: no calls are looked for."""
    reasoning: str | None = None
    """A built-in format or a plug-in's name; None: there is no reasoning."""
    call_template: CallTemplate | None = None
    """Of the plug-in `tools`, where it has one."""
    plugin_marks: ThinkingMarks | None = None
    """Of the plug-in `reasoning`."""
    starts_open: bool = False
    """Whether all up to the end mark is reasoning for the plug-in `reasoning`, even without the opening mark."""
    see_special_tokens: tuple[str, ...] = ()
    """The plug-ins among them that are to see the model's special tokens."""
    controls: tuple[ThinkingControl, ...] = ()
    """By which variables the chat template can be told how to reason."""
    documents: bool = False
    """Whether it shows a chat's documents."""

    @property
    def marks(self) -> ThinkingMarks | None:
        """What opens and closes the reasoning; None where there is none."""
        return self.plugin_marks or THINKING_MARKS.get(cast(ReasoningFormat, self.reasoning))

    @property
    def has_channels(self) -> bool:
        """Whether outputs are messages in channels, each of them reasoning, a call or text."""
        return self.tools == CHANNELS_OF_CALLS or self.reasoning == CHANNELS_OF_REASONING

    @property
    def sees_special_tokens(self) -> bool:
        """Whether special tokens are to stay in the text."""
        return self.has_channels or self.tools in self.see_special_tokens or self.reasoning in self.see_special_tokens
