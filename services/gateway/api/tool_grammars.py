"""Grammars for tool calls: in the model's own markup, with arguments that match the tools' JSON schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, get_args

from msgspec.structs import replace

from services.gateway.api.errors import invalid
from services.gateway.api.structured_outputs import OutputGrammar, structural_grammar
from services.gateway.api.tools import ToolDefinition, ToolOptions
from services.gateway.parsing.call_templates import CALL_TEMPLATES, CallTemplate
from services.gateway.parsing.dialects.harmony import harmony_output
from services.gateway.parsing.output_dialect import OutputDialect
from services.gateway.parsing.output_parser import ParserOptions
from shared.messages.dialects import CHANNELS_OF_CALLS, THINKING_MARKS, ToolFormat
from shared.models.structural_tags import (
    ANY_TEXT,
    Format,
    as_format,
    either,
    literal,
    perhaps,
    perhaps_behind_thoughts,
    regex,
    sequence,
    tag,
    tagged,
)

MAX_WHITESPACE = 1
"""White space characters in a row within arguments: without a bound an unsure model could write them for ever."""

MISTRAL = "[TOOL_CALLS]"
MISTRAL_OBJECT = CallTemplate('{"name": "', '", "arguments": ', "}")
NUMBER = ":[0-9]{1,6}"
FORMATS = get_args(ToolFormat)


def parser_options(
    dialect: OutputDialect,
    options: ToolOptions | None,
    *,
    include_reasoning: bool,
    continued: bool = False,
    guided: bool = False,
) -> ParserOptions | None:
    """Returns how to parse a chat's output; None where it is nothing but text. `continued`: see ParserOptions.
    `guided`: whether a grammar binds the output from its start, or from behind reasoning between both of its marks."""
    expected = dialect._replace(tools=_call_format(dialect, options))
    if guided and expected.reasoning == "deepseek_r1":
        expected = expected._replace(reasoning="qwen3")  # the same marks; without the first one there are no thoughts
    if expected.tools is None and expected.reasoning is None:
        return None
    if options is None:
        return ParserOptions(expected, include_reasoning=include_reasoning, continued=continued)
    return ParserOptions(expected, options.schemas, options.parallel, include_reasoning, continued)


GRAMMARS_OF_OUTPUTS = ("structured_outputs", "guided_")
"""What fields begin with that describe all of an output, whatever it is."""


def combined_grammar(
    dialect: OutputDialect, options: ToolOptions | None, output: OutputGrammar | None, *, continued: bool = False
) -> OutputGrammar | None:
    """Returns the grammar for calls, for the answer that the client described, or for either of them.

    It applies after the reasoning of a model that reasons. `continued`: whether the output continues a message. Raises
    RequestError 400.
    """
    if output is not None and options is not None and options.choice == "required":
        if output.field.startswith(GRAMMARS_OF_OUTPUTS):
            raise invalid(output.field, "not allowed together with a tool_choice that forces a call")
        output = None  # as OpenAI and vLLM have it: such a format is that of an answer's text, and a call has none
    if dialect.has_channels:
        return _in_channels(options, output, continued=continued)
    if options is not None:
        output = _with_calls(dialect, options, output)
    if output is None or (marks := dialect.marks) is None:
        return output
    known_to_tokenizer = dialect.starts_open or marks in THINKING_MARKS.values()
    if not known_to_tokenizer and (inner := as_format(output.grammar)) is not None:
        # The tokenizer does this for marks that it knows, once it has seen how the prompt ends.
        return structural_grammar(tagged(perhaps_behind_thoughts(inner, *marks)), output.field)
    return output._replace(grammar=replace(output.grammar, after=marks.end))


def _in_channels(options: ToolOptions | None, output: OutputGrammar | None, *, continued: bool) -> OutputGrammar | None:
    """A grammar for all of an output's messages."""
    forced = options is not None and options.choice == "required"
    tools = () if options is None else options.tools
    if output is not None:
        if (answer := as_format(output.grammar)) is None:
            return output
        whole, field = _messages(tools, answer), output.field
    elif options is None or not (forced or any(tool.strict for tool in tools)):
        return None
    else:
        whole, field = _messages(tools, None) if forced else _messages(_bound(tools), ANY_TEXT), options.field
    if continued:
        raise invalid("continue_final_message", f"not allowed together with {field}, as this model writes in channels")
    return structural_grammar(tagged(whole), field)


def _messages(tools: Iterable[ToolDefinition], answer: Format | None) -> Format:
    return harmony_output([(tool.name, arguments(tool.parameters)) for tool in tools], answer)


def _with_calls(dialect: OutputDialect, options: ToolOptions, output: OutputGrammar | None) -> OutputGrammar | None:
    form = _call_format(dialect, options)
    if form is None:
        return output
    calls: Format | None
    if options.choice == "required":
        calls = _forced(dialect, form, options)
    elif output is not None:
        answer, called = as_format(output.grammar), _forced(dialect, form, options)
        if answer is None or called is None:
            return output
        calls = either(answer, called)
    else:
        calls = _triggered(dialect, form, options) if any(tool.strict for tool in options.tools) else None
    return None if calls is None else structural_grammar(tagged(calls), output.field if output else options.field)


def _forced(dialect: OutputDialect, form: str, options: ToolOptions) -> Format | None:
    """A grammar for calls and nothing else; None where a plug-in's format has none."""
    if form in FORMATS:
        return forced_calls(cast(ToolFormat, form), options.tools, parallel=options.parallel)
    if (template := dialect.call_template) is None:
        return None
    return _section(template, options.tools, options.parallel)


def _triggered(dialect: OutputDialect, form: str, options: ToolOptions) -> Format | None:
    """A grammar for any text whose calls are valid; None where the format has none."""
    if form in FORMATS:
        return triggered_calls(cast(ToolFormat, form), options.tools)
    if (template := dialect.call_template) is None:
        return None
    return _templated_calls(template, _bound(options.tools))


def _section(template: CallTemplate, tools: Sequence[ToolDefinition], parallel: bool) -> Format:
    """One call, or several where `parallel`, with what is around them."""
    calls = _several([_templated(template, tool) for tool in tools], template.separator, parallel)
    if not template.section_begin:
        return calls
    return sequence(literal(template.section_begin), calls, literal(template.section_end))


def _templated_calls(template: CallTemplate, tools: Sequence[ToolDefinition]) -> Format:
    """Any text whose calls are valid."""
    trigger = template.trigger or template.begin
    if template.begin.startswith(trigger):
        return _after_trigger(trigger, [_templated(template, tool) for tool in tools])
    calls = _several([_templated(template, tool) for tool in tools], template.separator, True)
    return _after_trigger(trigger, [tag(template.section_begin, calls, template.section_end)])


def _templated(template: CallTemplate, tool: ToolDefinition) -> Format:
    end = template.end if isinstance(template.end, str) else list(template.end)
    written = arguments(tool.parameters, template.style)
    if not template.numbered:
        return tag(template.begin + tool.name + template.middle, written, end)
    return tag(template.begin + tool.name, sequence(regex(NUMBER), literal(template.middle), written), end)


def _call_format(dialect: OutputDialect, options: ToolOptions | None) -> str | None:
    """The format of the expected calls: the model's own, unless another one is forced."""
    if options is None:
        return None
    form = dialect.tools
    if dialect.has_channels and (options.choice == "required" or form is not None):
        return CHANNELS_OF_CALLS
    if options.choice != "required" or dialect.call_template is not None:
        return form
    return forced_format(cast(ToolFormat, form) if form in FORMATS else None, options.tools)


def forced_format(form: ToolFormat | None, tools: Iterable[ToolDefinition]) -> ToolFormat:
    """Returns the format to force calls in: `form`, the model's own, or JSON where that has no grammar for them."""
    if form is None or (form in ("pythonic", "llama4_pythonic") and not all(expressible(tool) for tool in tools)):
        return "llama3_json"
    return form


def forced_calls(form: ToolFormat, tools: Sequence[ToolDefinition], *, parallel: bool) -> Format:
    """Returns a grammar for one call of these tools, or several where `parallel`, and nothing else."""
    match form:
        case "mistral":  # a model knows one of the two forms, and starts accordingly
            array = sequence(literal(MISTRAL), _array(tools, parallel), literal("]"))
            return either(array, _several(_mistral_named(tools), "", parallel))
        case "pythonic" | "llama4_pythonic":
            calls = _several([keywords(tool, arguments) for tool in tools], ", ", parallel)
            return sequence(literal("["), calls, literal("]"))
        case "openai":  # which ends an output with its first call
            return _messages(tools, None)
        case _:
            return _section(CALL_TEMPLATES[form], tools, parallel)


def triggered_calls(form: ToolFormat, tools: Sequence[ToolDefinition]) -> Format | None:
    """Returns a grammar for any text whose calls are valid: calls of strict tools match their schemas, others take any
    object. None where the format makes that impossible, because a call may start like ordinary text."""
    bound = _bound(tools)
    match form:
        case "mistral":
            return _after_trigger(MISTRAL, [tag(MISTRAL, _array(bound, True), "]"), *_mistral_named(bound)])
        case "pythonic" | "llama4_pythonic":
            return None
        case "openai":
            return _messages(bound, ANY_TEXT)
        case _:
            return _templated_calls(CALL_TEMPLATES[form], bound)


def _bound(tools: Sequence[ToolDefinition]) -> list[ToolDefinition]:
    return [tool if tool.strict else tool._replace(parameters={"type": "object"}) for tool in tools]


def arguments(schema: dict[str, Any], style: str = "json") -> Format:
    """Returns a grammar for a call's arguments; `style` is one of xgrammar's."""
    return {"type": "json_schema", "json_schema": schema, "style": style, "max_whitespace_cnt": MAX_WHITESPACE}


def _several(calls: list[Format], separator: str, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _after_trigger(trigger: str, calls: list[Format]) -> Format:
    return {"type": "triggered_tags", "triggers": [trigger], "tags": calls}


def _array(tools: Sequence[ToolDefinition], parallel: bool) -> Format:
    """` [{"name": …, "arguments": …}`, up to the bracket that closes it."""
    calls = _several([_templated(MISTRAL_OBJECT, tool) for tool in tools], ", ", parallel)
    return sequence(regex(" ?"), literal("["), calls)


def _mistral_named(tools: Sequence[ToolDefinition]) -> list[Format]:
    """The name and then the arguments, with or without a mark between them."""
    marks = ("", "[ARGS]")
    return [tag(MISTRAL + tool.name + mark, arguments(tool.parameters), "") for tool in tools for mark in marks]


PLAIN_KEYS = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$defs",
        "definitions",
        "$schema",
    }
)
"""Keywords of a schema that describes each property by itself. `additionalProperties` is allowed: none are written."""
DEFINITIONS = ("$defs", "definitions")

GrammarOfSchema = Callable[[dict[str, Any]], Format]
"""Makes the grammar of a value from its schema."""


def expressible(tool: ToolDefinition) -> bool:
    """Whether the schema says only what each argument may be and which arguments are required."""
    schema = tool.parameters
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    return (
        PLAIN_KEYS.issuperset(schema)
        and isinstance(required, list)
        and all(isinstance(key, str) and key in properties for key in required)
        and all(key.isidentifier() and value is not False for key, value in properties.items())
    )


def keywords(tool: ToolDefinition, value: GrammarOfSchema) -> Format:
    """Returns a grammar for one call in Python's syntax, `f(a=1, b="x")`.

    Arguments come in the order of the schema's properties; optional ones may be missing. Values are JSON, which the
    parser reads as Python literals.
    """
    schema = tool.parameters
    shared = {key: schema[key] for key in DEFINITIONS if key in schema}
    required = set(schema.get("required", ()))
    written: list[tuple[Format, bool]] = []
    for key, described in schema.get("properties", {}).items():
        inner = described if isinstance(described, dict) else {}
        written.append((sequence(literal(f"{key}="), value({**shared, **inner})), key in required))
    return tag(f"{tool.name}(", _listed(written), ")")


def _listed(written: list[tuple[Format, bool]]) -> Format:
    """Arguments separated by commas; the flag says whether an argument is required."""
    first = next((i for i, (_, required) in enumerate(written) if required), None)
    if first is None:
        starts = [sequence(written[i][0], *_further(written[i + 1 :])) for i in range(len(written))]
        return perhaps(either(*starts)) if starts else literal("")
    before = [perhaps(sequence(format_, literal(", "))) for format_, _ in written[:first]]
    return sequence(*before, written[first][0], *_further(written[first + 1 :]))


def _further(written: list[tuple[Format, bool]]) -> list[Format]:
    followed = [(sequence(literal(", "), format_), required) for format_, required in written]
    return [format_ if required else perhaps(format_) for format_, required in followed]
