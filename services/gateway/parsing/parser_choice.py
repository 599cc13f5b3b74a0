"""The formats that a gateway was configured to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from services.gateway.parsing.call_templates import CallTemplate
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.plugin_parsers import BUILT_IN_REASONING, BUILT_IN_TOOLS, reasoning_parser, tool_parser
from shared.messages.dialects import REASONING_ALIASES, TOOL_ALIASES, Dialect, ReasoningFormat, ToolFormat
from shared.plugins.entry_points import PluginError


class ParserChoice(NamedTuple):
    """The formats, built-in ones or plug-ins by their names; `auto` means those that a model's chat template shows."""

    tools: str = "auto"
    reasoning: str = "auto"

    def check(self) -> None:
        """Loads the plug-ins among them. Raises ValueError that names the setting."""
        for setting, name, load in (
            ("tool_call_parser", self._tool_plugin, tool_parser),
            ("reasoning_parser", self._reasoning_plugin, reasoning_parser),
        ):
            try:
                if name is not None:
                    load(name)
            except PluginError as error:
                raise ValueError(f"{setting} = {name}: {error}") from None

    def dialect(self, detected: Dialect) -> OutputDialect:
        """Returns the formats to read for a model of which the tokenizer service has detected `detected`."""
        tools = None if (name := self._tool_plugin) is None else tool_parser(name)
        reasoning = None if (name := self._reasoning_plugin) is None else reasoning_parser(name)
        seeing = [self.tools] if tools is not None and tools.sees_special_tokens else []
        seeing += [self.reasoning] if reasoning is not None and reasoning.sees_special_tokens else []
        template = "" if tools is None else tools.call_template
        return OutputDialect(
            _chosen(self.tools, detected.tools, TOOL_ALIASES),
            _chosen(self.reasoning, detected.reasoning, REASONING_ALIASES),
            call_template=CallTemplate.parse(template) if template else None,
            plugin_marks=None if reasoning is None else reasoning.marks,
            starts_open=reasoning is not None and reasoning.starts_open,
            see_special_tokens=tuple(seeing),
            controls=detected.controls,
            documents=detected.documents,
        )

    @property
    def _tool_plugin(self) -> str | None:
        return None if self.tools in BUILT_IN_TOOLS else self.tools

    @property
    def _reasoning_plugin(self) -> str | None:
        return None if self.reasoning in BUILT_IN_REASONING else self.reasoning


def _chosen(
    name: str, detected: str | None, aliases: Mapping[str, ToolFormat] | Mapping[str, ReasoningFormat]
) -> str | None:
    match name:
        case "auto":
            return detected
        case "none":
            return None
        case _:
            return aliases.get(name, name)
