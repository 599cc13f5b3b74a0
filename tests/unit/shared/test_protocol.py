"""Which releases work together."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from shared.bus.codec import decode, encode
from shared.messages.lifecycle import Lifecycle
from shared.protocol import OWN, SpokenProtocols, incompatibility
from tests.contracts.test_golden_messages import MESSAGES


def test_processes_that_understand_each_other_are_compatible() -> None:
    assert incompatibility(OWN) is None
    assert incompatibility(SpokenProtocols(1, 3), SpokenProtocols(3, 5)) is None
    assert incompatibility(SpokenProtocols(3, 5), SpokenProtocols(1, 3)) is None


def test_the_reason_says_which_release_is_behind() -> None:
    assert incompatibility(SpokenProtocols(1, 2), SpokenProtocols(3, 5)) == (
        "its release is too old: it speaks protocol 1 to 2, this one 3 to 5"
    )
    assert incompatibility(SpokenProtocols(7, 7), SpokenProtocols(3, 5)) == (
        "its release is too new: it speaks protocol 7, this one 3 to 5"
    )


def test_a_message_without_a_protocol_is_of_the_first_one() -> None:
    [life, *_] = [message for message in MESSAGES if isinstance(message, Lifecycle)]
    fields = msgspec.msgpack.decode(encode(replace(life, min_protocol=4, protocol=9)))
    assert decode(msgspec.msgpack.encode(fields), Lifecycle).protocols == SpokenProtocols(4, 9)
    said = Lifecycle.__struct_fields__.index("min_protocol")
    assert decode(msgspec.msgpack.encode(fields[:said]), Lifecycle).protocols == SpokenProtocols(1, 1)


def test_fields_of_a_later_release_are_ignored() -> None:
    [life, *_] = [message for message in MESSAGES if isinstance(message, Lifecycle)]
    fields = msgspec.msgpack.decode(encode(life))
    assert decode(msgspec.msgpack.encode([*fields, "new", {"and": "more"}]), Lifecycle) == life
