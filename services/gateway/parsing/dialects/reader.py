"""The reader of each format of tool calls that is built in."""

from __future__ import annotations

from typing import assert_never

from services.gateway.parsing.dialects.deepseek_v3 import DeepSeekV3
from services.gateway.parsing.dialects.glm45 import Glm45
from services.gateway.parsing.dialects.granite import Granite
from services.gateway.parsing.dialects.hermes import TaggedCalls
from services.gateway.parsing.dialects.kimi_k2 import KimiK2
from services.gateway.parsing.dialects.llama3_json import Llama3Json
from services.gateway.parsing.dialects.minimax import MiniMaxM1, MiniMaxM2
from services.gateway.parsing.dialects.mistral import Mistral
from services.gateway.parsing.dialects.pythonic import Pythonic
from services.gateway.parsing.events import ToolCallFormat
from services.gateway.parsing.output_dialect import Schemas
from shared.messages.dialects import ToolFormat


def format_reader(form: ToolFormat, schemas: Schemas) -> ToolCallFormat:
    """Returns the reader of a format, for calls of the functions in `schemas`."""
    match form:
        case "hermes":
            return TaggedCalls(schemas, bare=False)
        case "qwen3_xml":
            return TaggedCalls(schemas, bare=True)
        case "mistral":
            return Mistral()
        case "llama3_json":
            return Llama3Json(schemas)
        case "pythonic" | "llama4_pythonic":
            return Pythonic(schemas)
        case "deepseek_v3" | "deepseek_v31":
            return DeepSeekV3()
        case "granite":
            return Granite(schemas)
        case "kimi_k2":
            return KimiK2(schemas)
        case "glm45":
            return Glm45(schemas)
        case "minimax_m2":
            return MiniMaxM2(schemas)
        case "minimax":
            return MiniMaxM1()
        case "openai":
            raise AssertionError("HarmonyReader reads whole outputs")
        case _:
            assert_never(form)
