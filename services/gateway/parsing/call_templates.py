"""How each format writes calls, so that a grammar can force them. Formats that no template describes are not here."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, NamedTuple

from shared.messages.dialects import ToolFormat

ArgumentStyle = Literal["json", "qwen_xml", "glm_xml", "minimax_xml"]
"""xgrammar's names."""


class CallTemplate(NamedTuple):
    """How a format writes one call, and what is around several."""

    begin: str
    """Up to the name."""
    middle: str
    """Between the name and the arguments."""
    end: str | tuple[str, ...]
    """Behind the arguments; several are alternatives."""
    separator: str = "\n"
    """Between two calls."""
    section_begin: str = ""
    """Before the first call."""
    section_end: str = ""
    """Behind the last one."""
    trigger: str = ""
    """What shows a call in a text: the beginning of `begin` or of `section_begin`; empty: all of `begin`."""
    style: ArgumentStyle = "json"
    numbered: bool = False
    """Whether `:` and a number follow the name."""

    @classmethod
    def parse(cls, text: str) -> CallTemplate:
        """Reads a plug-in's `begin{name}middle{arguments}end`. Raises ValueError."""
        begin, _, rest = text.partition("{name}")
        middle, arguments, end = rest.partition("{arguments}")
        if not (begin and arguments) or text.count("{name}") != 1 or text.count("{arguments}") != 1:
            raise ValueError(
                f"call_template = {text!r}: BEGIN{{name}}MIDDLE{{arguments}}END is expected, with one of each"
            )
        return cls(begin, middle, end)


_QWEN_XML_END = "</function>\n</tool_call>"

CALL_TEMPLATES: MappingProxyType[ToolFormat, CallTemplate] = MappingProxyType(
    {
        "hermes": CallTemplate('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", trigger="<tool_call>"),
        "qwen3_xml": CallTemplate(
            "<tool_call>\n<function=",
            ">\n",
            ("\n" + _QWEN_XML_END, _QWEN_XML_END),  # on its own line, or on the next where there are no parameters
            trigger="<tool_call>",
            style="qwen_xml",
        ),
        "llama3_json": CallTemplate('{"name": "', '", "parameters": ', "}", "; "),
        "deepseek_v3": CallTemplate(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            section_begin="<｜tool▁calls▁begin｜>",
            section_end="<｜tool▁calls▁end｜>",
            trigger="<｜tool▁call▁begin｜>",
        ),
        "deepseek_v31": CallTemplate(
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            separator="",
            section_begin="<｜tool▁calls▁begin｜>",
            section_end="<｜tool▁calls▁end｜>",
        ),
        "granite": CallTemplate(
            '{"name": "',
            '", "arguments": ',
            "}",
            separator=", ",
            section_begin="<|tool_call|>[",
            section_end="]",
            trigger="<|tool_call|>",
        ),
        "kimi_k2": CallTemplate(
            "<|tool_call_begin|>functions.",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            separator="",
            section_begin="<|tool_calls_section_begin|>",
            section_end="<|tool_calls_section_end|>",
            trigger="<|tool_call_begin|>",
            numbered=True,
        ),
        "glm45": CallTemplate("<tool_call>", "", "</tool_call>", style="glm_xml"),
        "minimax_m2": CallTemplate(
            '<invoke name="',
            '">\n',
            "</invoke>\n",
            separator="",
            section_begin="<minimax:tool_call>\n",
            section_end="</minimax:tool_call>",
            trigger="<minimax:tool_call>",
            style="minimax_xml",
        ),
        "minimax": CallTemplate(
            '{"name": "',
            '", "arguments": ',
            "}\n",
            separator="",
            section_begin="<tool_calls>\n",
            section_end="</tool_calls>",
            trigger="<tool_calls>",
        ),
    }
)
"""mistral and pythonic have more than one form, or another one for each function, and openai binds whole outputs: see
`api/tool_grammars.py`."""
