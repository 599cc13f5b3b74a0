"""What is read and written of NATS's protocol without the client library."""

from __future__ import annotations

import pytest

from shared.bus.nats_wire import DirectReceivers, publish_command


def receivers(*numbers: int, refusing: bytes = b"refused") -> tuple[DirectReceivers, list[tuple[int, bytes]]]:
    """Receivers of these subscriptions, which take every payload but one, and what they have taken."""
    direct, taken = DirectReceivers(), []

    def receiver(number: int):  # type: ignore[no-untyped-def]
        def receive(payload: bytes) -> bool:
            if payload == refusing:
                return False
            taken.append((number, payload))
            return True

        return receive

    for number in numbers:
        direct.add(number, receiver(number))
    return direct, taken


def test_a_message_is_published_as_the_protocol_has_it() -> None:
    assert publish_command("baton.route", "", b"hi\r\n") == b"PUB baton.route  4\r\nhi\r\n\r\n"
    assert publish_command("baton.route", "_INBOX.1.7", b"") == b"PUB baton.route _INBOX.1.7 0\r\n\r\n"


def test_whole_messages_are_handed_out_and_the_rest_is_returned() -> None:
    direct, taken = receivers(1, 2)
    data = b"MSG a.b 1 5\r\nhello\r\nMSG c 2 reply.to 4\r\n\r\n\r\n\r\nMSG a.b 1 0\r\n\r\n"
    assert direct.take(data) == b""
    assert taken == [(1, b"hello"), (2, b"\r\n\r\n"), (1, b"")]


def test_nothing_that_is_cut_anywhere_is_lost_or_handed_out_twice() -> None:
    data = b"MSG a.b 1 5\r\nhello\r\nMSG c 2 reply.to 3\r\nyou\r\n"
    for cut in range(len(data) + 1):
        direct, taken = receivers(1, 2)
        rest = direct.take(data[:cut])
        assert direct.take(rest + data[cut:]) == b""
        assert taken == [(1, b"hello"), (2, b"you")]


@pytest.mark.parametrize(
    "other",
    [
        b"PING\r\n",
        b"+OK\r\n",
        b"HMSG a 1 reply 12 12\r\nNATS/1.0\r\n\r\n\r\n",
        b"MSG a 3 2\r\nno\r\n",
        b"MSG a 1 7\r\nrefused\r\n",
        b"MSG a one 2\r\nno\r\n",
        b"MSG a 1 -2\r\nno\r\n",
        b"MSG a 1 reply to 2\r\nno\r\n",
        b"MSG a 1 2\r\nnone",
    ],
)
def test_what_nobody_takes_stays_with_everything_behind_it(other: bytes) -> None:
    direct, taken = receivers(1)
    behind = b"MSG a 1 2\r\nhi\r\n"
    assert direct.take(behind + other + behind) == other + behind
    assert taken == [(1, b"hi")]


def test_who_was_removed_gets_nothing() -> None:
    direct, taken = receivers(1)
    direct.remove(1)
    direct.remove(1)
    assert direct.take(b"MSG a 1 2\r\nhi\r\n") == b"MSG a 1 2\r\nhi\r\n"
    assert taken == []
