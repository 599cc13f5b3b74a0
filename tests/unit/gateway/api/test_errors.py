"""What is said of bodies that are large, and wrong: briefly, and without objects made of all that is in them."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from services.gateway.api.errors import RequestError
from services.gateway.api.fields.stored_chat import read_chat_update
from services.gateway.api.ollama.request import read_show

LISTS = b"[" + b"[]," * 100_000 + b"[]]"


@pytest.mark.parametrize(
    ("read", "body", "param", "says"),
    [
        (read_show, b'{"model":1,"x":%b}' % LISTS, "model", "model: 1 is not allowed; expected"),
        (read_chat_update, b'{"metadata":%b}' % LISTS, "metadata", "metadata: [[],[],[],"),
        (read_chat_update, b'{"metadata":{"a":%b}}' % LISTS, "metadata", "expected `str`, got `array`"),
        (read_chat_update, b'{"metadata":NaN,"x":%b}' % LISTS, "body", "not valid JSON"),
        (read_chat_update, b'{"%b":1}' % (b"x" * len(LISTS)), "x" * 100 + "…", "this field is not known"),
        (read_chat_update, b'{"%b":NaN}' % (b"x" * len(LISTS)), "x" * 100, "NaN"),
    ],
)
def test_no_objects_are_made_of_a_large_body(read: Any, body: bytes, param: str, says: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as refused:
            read(body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.param == param
    assert says in refused.value.message
    assert len(refused.value.body()) < 1000
    assert peak < 5 * len(body)  # objects of it take 19 times as much
