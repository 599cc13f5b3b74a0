"""What tools and thoughts come to for a chat: how its output is taken apart, and what grammar binds it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec.structs import replace

from services.gateway.api.errors import invalid
from services.gateway.api.structured import Guided, structural_guided
from services.gateway.parsing.output_parser import NO_SCHEMAS, Parsing
from services.gateway.tools.grammars import forced, guidable, triggered
from services.gateway.tools.offer import Offer
from shared.dialects import THINKING_MARKS, Dialect, ReasoningFormat, ToolFormat
from shared.structural_tags import Format, as_format, either, tagged


class ParserChoice(NamedTuple):
    """Which formats this gateway reads: those that a model's template shows, or what it was told at its start."""

    tools: ToolFormat | Literal["auto", "none"] = "auto"
    reasoning: ReasoningFormat | Literal["auto", "none"] = "auto"

    def of(self, seen: Dialect) -> Dialect:
        """`seen`: as the model's tokenizer says."""
        return Dialect(
            seen.tools if self.tools == "auto" else None if self.tools == "none" else self.tools,
            seen.reasoning if self.reasoning == "auto" else None if self.reasoning == "none" else self.reasoning,
        )


def plan_parsing(dialect: Dialect, offer: Offer | None, *, tell_reasoning: bool) -> Parsing | None:
    """None where the output is text and nothing else."""
    spoken = Dialect(_written_in(dialect, offer), dialect.reasoning)
    if spoken == Dialect():
        return None
    return Parsing(spoken, NO_SCHEMAS if offer is None else offer.schemas, _parallel(offer), tell_reasoning)


def plan_grammar(dialect: Dialect, offer: Offer | None, guided: Guided | None) -> Guided | None:
    """The grammar for calls, for what the client wants the answer to match, or for either of them. It binds behind the
    thoughts of a model that thinks. Raises ApiError 400."""
    if offer is not None:
        guided = _with_calls(dialect, offer, guided)
    if guided is None or dialect.reasoning is None:
        return guided
    after = THINKING_MARKS[dialect.reasoning].end
    return guided._replace(grammar=replace(guided.grammar, after=after))


def _with_calls(dialect: Dialect, offer: Offer, guided: Guided | None) -> Guided | None:
    form = _written_in(dialect, offer)
    if form is None:
        return guided
    calls: Format | None
    if offer.choice == "required":
        if guided is not None:
            raise invalid(guided.field, "not allowed together with a tool_choice that forces a call")
        calls = forced(form, offer.tools, parallel=offer.parallel)
    elif guided is not None:
        answer = as_format(guided.grammar)
        if answer is None:
            return guided
        calls = either(answer, forced(form, offer.tools, parallel=offer.parallel))
    else:
        calls = triggered(form, offer.tools) if any(tool.strict for tool in offer.tools) else None
    return None if calls is None else structural_guided(tagged(calls), guided.field if guided else offer.field)


def _written_in(dialect: Dialect, offer: Offer | None) -> ToolFormat | None:
    """The format of the calls to come: the model's own, unless it is forced to another."""
    if offer is None:
        return None
    return guidable(dialect.tools, offer.tools) if offer.choice == "required" else dialect.tools


def _parallel(offer: Offer | None) -> bool:
    return offer is None or offer.parallel
