"""OpenAI's harmony format (gpt-oss): an output is a row of messages, each with a channel that says for whom it is.

https://github.com/openai/harmony/blob/main/docs/format.md. The library `openai-harmony` reads tokens, by a vocabulary
that it downloads; here the text is read, like that of any other model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from services.gateway.parsing.events import ParseEvents
from services.gateway.parsing.json_calls import read_value
from services.gateway.parsing.text_cursor import Emit, NotAToolCall, OutputEnd, Reading, TextCursor
from shared.models.structural_tags import ANY_TEXT, Format, either, literal, perhaps, regex, sequence, tag

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ASSISTANT = f"{START}assistant"
RECIPIENT = "to="
HEADER_STARTS = (START, CHANNEL, RECIPIENT)
ENDS = (END, RETURN, CALL)
"""What ends a message. The last two end the output as well, and are seldom part of its text."""
FUNCTIONS = "functions."

_CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*([A-Za-z]*)")
_RECIPIENT_NAME = re.compile(r"(?:^|[\s>])to=([^\s<]+)")


class MessageHeader(NamedTuple):
    """What a message says of itself."""

    channel: str
    """`analysis`, `commentary` or `final`; empty: none is named."""
    recipient: str
    """Who is called; empty: nobody."""

    @classmethod
    def parse(cls, text: str) -> MessageHeader:
        """Reads the text before the message. The recipient may stand before the channel or behind it."""
        channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT_NAME.search(text)
        return cls(channel[1] if channel else "", recipient[1] if recipient else "")


class HarmonyReader:
    """Owns what is known of one output's messages. The prompt has written `<|start|>assistant` already."""

    def __init__(
        self, cursor: TextCursor, events: ParseEvents, *, functions: Collection[str] | None, separate_reasoning: bool
    ) -> None:
        """`functions`: those of the request; None: calls are not looked for. Unless `separate_reasoning`, reasoning is
        content."""
        self._cursor, self._events = cursor, events
        self._functions = functions
        self._separate_reasoning = separate_reasoning
        self._written: set[Emit] = set()
        """Where messages have gone to."""

    def read(self, *, continued: bool) -> Reading[None]:
        """Reads to the end of the output. `continued`: it begins within a message of the final channel."""
        cursor = self._cursor
        if continued:
            yield from self._read_text(self._events.content)
        while (yield from cursor.peek()):
            yield from self._read_message()

    def _read_message(self) -> Reading[None]:
        cursor = self._cursor
        cursor.mark()
        yield from cursor.skip_whitespace()
        start = yield from cursor.match_ahead(HEADER_STARTS)
        if start is None:
            cursor.rewind()
            yield from self._read_text(self._events.content)
            return
        yield from cursor.expect(start)
        text: list[str] = [start]
        try:
            end = yield from cursor.read_until((MESSAGE, START, *ENDS), text.append)
        except OutputEnd:
            if not cursor.truncated:
                self._events.content(self._as_written())
            cursor.mark()
            return
        if end != MESSAGE:
            self._events.content(self._as_written())
            if end != START:
                yield from cursor.expect(end)
            return
        yield from cursor.expect(MESSAGE)
        yield from self._read_body(MessageHeader.parse("".join(text)))

    def _read_body(self, header: MessageHeader) -> Reading[None]:
        name = self._called(header.recipient)
        if name is not None:
            yield from self._read_call(name)
        elif header.recipient and header.channel != "analysis":
            # A call of what the request does not offer.
            yield from self._read_text(self._events.content, self._as_written())
        else:
            reasons = header.channel == "analysis" and self._separate_reasoning
            yield from self._read_text(self._events.reasoning if reasons else self._events.content)

    def _as_written(self) -> str:
        """The message so far, as the model wrote it."""
        return self._cursor.since_mark.lstrip().removeprefix(ASSISTANT)

    def _called(self, recipient: str) -> str | None:
        if self._functions is None:
            return None
        if recipient.startswith(FUNCTIONS):
            return recipient.removeprefix(FUNCTIONS) or None
        return recipient if recipient in self._functions else None

    def _read_call(self, name: str) -> Reading[None]:
        cursor, events = self._cursor, self._events
        try:
            yield from self._read_arguments(name)
        except NotAToolCall as reason:
            if events.in_call and isinstance(reason, OutputEnd) and cursor.truncated:
                events.end_call()
                return
            if events.in_call:
                events.retract_call()
            yield from self._read_text(events.content, self._as_written())

    def _read_arguments(self, name: str) -> Reading[None]:
        """Reads a JSON object; nothing at all means that there are no arguments."""
        cursor, events = self._cursor, self._events
        yield from cursor.skip_whitespace()
        if not (yield from cursor.peek()) or (yield from cursor.match_ahead(ENDS)):
            if cursor.truncated:
                raise OutputEnd
            events.start_call(name)
            events.arguments("{}")
        else:
            if (yield from cursor.peek()) != "{":
                raise NotAToolCall
            events.start_call(name)
            yield from read_value(cursor, events.arguments)
        yield from cursor.skip_whitespace()
        if (yield from cursor.peek()) and (yield from cursor.match_ahead((START,))) is None:
            yield from cursor.expect(*ENDS)
        events.end_call()
        cursor.mark()

    def _read_text(self, emit: Emit, beginning: str = "") -> Reading[None]:
        """Passes a message's text on, behind its `beginning`. One that follows another of its kind begins on a line of
        its own."""
        cursor = self._cursor
        cursor.mark()
        separator = "\n" if emit in self._written else ""

        def separated(text: str) -> None:
            nonlocal separator
            emit(separator + text)
            separator = ""
            self._written.add(emit)

        if beginning:
            separated(beginning)
        try:
            end = yield from cursor.read_until((START, *ENDS), separated)
        except OutputEnd:
            return
        if end != START:
            yield from cursor.expect(end)


def harmony_output(calls: Iterable[tuple[str, Format]], answer: Format | None) -> Format:
    """Returns a grammar for a whole output: reasoning and preambles, and then one of the calls, given by name with the
    grammar of its arguments, or the answer."""
    texts = [tag(f"{CHANNEL}{name}{MESSAGE}", ANY_TEXT, END) for name in ("analysis", "commentary")]
    before: Format = {"type": "tags_with_separator", "tags": texts, "separator": ASSISTANT}
    before["at_least_one"] = True
    last = [sequence(_call_header(name), arguments) for name, arguments in calls]
    if answer is not None:
        last.append(sequence(literal(f"{CHANNEL}final{MESSAGE}"), answer))
    return sequence(perhaps(sequence(before, literal(ASSISTANT))), either(*last))


def _call_header(name: str) -> Format:
    """The recipient behind the channel, as the model was trained, or before it, as its chat template writes it."""
    behind = sequence(
        literal(f"{CHANNEL}commentary {RECIPIENT}{FUNCTIONS}{name}"), regex(" ?"), literal(f"{CONSTRAIN}json{MESSAGE}")
    )
    ahead = sequence(
        literal(f" {RECIPIENT}{FUNCTIONS}{name}{CHANNEL}commentary "),
        perhaps(literal(CONSTRAIN)),
        literal(f"json{MESSAGE}"),
    )
    return either(behind, ahead)
