"""The events of a response's stream, numbered; and what is left of them where another gateway goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from services.gateway.api.errors import RequestError
from services.gateway.api.response import ChoiceState, ResponseHeader
from services.gateway.api.responses.answer import finished, output_of, response_object
from services.gateway.api.responses.tools import call_targets
from services.gateway.parsing.answer_parts import Event
from shared.messages.gateway import Delta

LAST = ("response.completed", "response.incomplete", "response.failed")
"""Types of the last event of a stream."""


class ResponseEvents:
    """Owns the number of the next event, and what is known of the events before."""

    def __init__(self, header: ResponseHeader, echoed: dict[str, Any], former: Iterable[Event] = ()) -> None:
        """`former`: those that a gateway before this one has made. What they have said is not said again."""
        self._header, self._echoed = header, echoed
        self._targets = call_targets(echoed["tools"])
        self._number = 0
        self._texts: Counter[int] = Counter()
        """Characters that were sent of each item before."""
        self._said: set[tuple[str, int]] = set()
        for event in former:
            self._number = event["sequence_number"] + 1
            if "delta" in event:
                self._texts[event["output_index"]] += len(event["delta"])
            elif "output_index" in event:
                self._said.add((event["type"], event["output_index"]))

    def output(self, choice: ChoiceState, delta: Delta) -> list[Event]:
        """Returns the events of new output; none where nothing is decided yet."""
        items = output_of(choice)
        items.name, items.targets = self._header.id, self._targets
        items.record(delta.logprobs)
        events = [rest for event in items.feed(delta.text, delta.finish) if (rest := self._rest(event)) is not None]
        return [*self._begin(), *map(self._numbered, events)] if events else []

    def finished(self, choice: ChoiceState) -> dict[str, Any]:
        """Returns the response at its end."""
        return finished(self._header, self._echoed, choice)

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Returns the response that ended with an error."""
        return response_object(self._header, self._echoed, "failed", error=error)

    def end(self, response: dict[str, Any]) -> list[Event]:
        """Returns the last events: the whole response, as it has ended."""
        return [*self._begin(), self._numbered({"type": f"response.{response['status']}", "response": response})]

    def _begin(self) -> list[Event]:
        if self._number:
            return []
        begun = response_object(self._header, self._echoed)
        return [self._numbered({"type": f"response.{kind}", "response": begun}) for kind in ("created", "in_progress")]

    def _rest(self, event: Event) -> Event | None:
        """What of an event was not said before; None: nothing."""
        index: int = event["output_index"]
        if "delta" not in event:
            return None if (event["type"], index) in self._said else event
        said = min(self._texts[index], len(event["delta"]))
        self._texts[index] -= said
        rest = event["delta"][said:]
        return {**event, "delta": rest} if rest or not said else None

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._number
        self._number += 1
        return event
