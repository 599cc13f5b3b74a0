"""How a text is cut into windows that are scored."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench.engine.perplexity import TextWindow, scheme_list, windows


def test_each_window_scores_what_the_one_before_did_not_have() -> None:
    assert windows([*range(10)], 6, 3) == [
        TextWindow([*range(6)], 5),
        TextWindow([*range(3, 9)], 3),
        TextWindow([*range(6, 10)], 1),
    ]


def test_a_text_that_fits_is_one_window() -> None:
    assert windows([*range(5)], 8, 4) == [TextWindow([*range(5)], 4)]
    assert windows([7], 8, 4) == []


def test_what_comes_before_the_completion_is_read_and_not_scored() -> None:
    assert windows([*range(10)], 6, 3, 7) == [TextWindow([*range(3, 9)], 2), TextWindow([*range(6, 10)], 1)]


@given(size=st.integers(0, 60), length=st.integers(2, 20), data=st.data())
def test_every_token_is_scored_once_and_from_as_many_as_promised(size: int, length: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, length - 1))
    first = data.draw(st.integers(1, max(1, size)))
    parts = windows([*range(size)], length, stride, first)
    scored = [token for part in parts for token in part.tokens[len(part.tokens) - part.scored :]]
    assert scored == [*range(first, size)]
    for part in parts:
        assert len(part.tokens) <= length
        assert part.scored < len(part.tokens)
        start, seen = part.tokens[0], len(part.tokens) - part.scored
        assert start == 0 or seen >= length - stride


def test_schemes_are_named() -> None:
    assert scheme_list("auto,int4") == ["auto", "int4"]
    with pytest.raises(argparse.ArgumentTypeError, match="'int3': of auto, int8, w8a8_int8, int4, fp8, w8a8_fp8"):
        scheme_list("int3")
