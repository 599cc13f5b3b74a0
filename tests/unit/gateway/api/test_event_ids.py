"""The ids of events are read as they were written; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.errors import RequestError
from services.gateway.api.event_ids import ChoicePosition, EventId
from shared.messages.gateway import MAX_STREAM_CHOICES

STREAM = "chatcmpl-0123456789abcdef01234567"
COUNT = st.integers(0, 10**9 - 1)
CHOICES = st.lists(
    st.none() | st.builds(ChoicePosition, COUNT, COUNT, st.booleans()), min_size=1, max_size=MAX_STREAM_CHOICES
)


@given(CHOICES, st.booleans())
def test_an_id_is_read_as_it_was_written(choices: list[ChoicePosition | None], usage: bool) -> None:
    event = EventId(STREAM, tuple(choices), usage)
    assert EventId.read(str(event).encode()) == event


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"17",
        f"{STREAM}".encode(),
        f"{STREAM}:1".encode(),
        f"{STREAM}:1.2x".encode(),
        f"{STREAM}:-1.2".encode(),
        f"{STREAM}:1.2:v".encode(),
        f"{STREAM}:{'1' * 10}.2".encode(),
        f"{STREAM}:{',' * MAX_STREAM_CHOICES}".encode(),
        f"chatcmpl-xyz:{'1.2'}".encode(),
        "chatcmpl-0123456789abcdef0123456é:1.2".encode(),
        b"\xff" * 4000,
    ],
)
def test_what_no_stream_has_sent_is_refused(header: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        EventId.read(header)
    assert (refused.value.status, refused.value.param) == (400, "Last-Event-ID")
    assert len(refused.value.message) < 200
