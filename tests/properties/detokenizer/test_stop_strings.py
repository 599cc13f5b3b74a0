"""Stop strings: nothing of one is ever delivered, whatever pieces the text comes in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.core.stop_strings import StopHit, StopScan, stop_strings

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple)


def first_complete(text: str, stops: tuple[str, ...], free: int) -> tuple[str, int] | None:
    """Plainly: the stop string that is complete first behind the first `free` characters, the longest of those."""
    for end in range(free + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return max(ending, key=len), end
    return None


def fed(scan: StopScan, pieces: list[str], free: int) -> tuple[list[str], StopHit | None]:
    """What was delivered, piece by piece; the first `free` characters' pieces come while stops are not armed."""
    delivered: list[str] = []
    seen = 0
    for piece in pieces:
        seen += len(piece)
        answer = scan.feed(piece, armed=seen > free)
        if isinstance(answer, StopHit):
            return [*delivered, answer.text], answer
        delivered.append(answer)
    return [*delivered, scan.rest()], None


def cut(text: str, cuts: list[int]) -> list[str]:
    at = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(at)]


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=5), include=st.booleans())
def test_the_text_ends_at_the_stop_string_that_is_complete_first(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    delivered, hit = fed(StopScan(stops, include=include), cut(text, cuts), 0)
    expected = first_complete(text, stops, 0)
    if expected is None:
        assert hit is None
        assert "".join(delivered) == text
    else:
        stop, end = expected
        assert hit is not None
        assert hit.stop == stop
        assert "".join(delivered) == (text[:end] if include else text[: end - len(stop)])


@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 12), max_size=5))
def test_no_more_is_held_back_than_could_become_a_stop_string(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    scan = StopScan(stops, include=False)
    seen = delivered = ""
    for piece in cut(text, cuts):
        answer = scan.feed(piece, armed=True)
        if isinstance(answer, StopHit):
            return
        seen += piece
        delivered += answer
        held = seen[len(delivered) :]
        longest = max(
            (n for stop in stops for n in range(1, len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert len(held) == longest


@given(text=LETTERS, stops=STOPS, free=st.integers(0, 12))
def test_what_ends_before_stops_are_armed_is_text_like_any_other(text: str, stops: tuple[str, ...], free: int) -> None:
    delivered, hit = fed(StopScan(stops, include=False), list(text), free)
    expected = first_complete(text, stops, free)
    if expected is None:
        assert (hit, "".join(delivered)) == (None, text)
    else:
        assert hit is not None
        assert hit.stop == expected[0]


def test_an_empty_stop_string_stops_nothing() -> None:
    assert StopScan(("", "x"), include=False).feed("abc", armed=True) == "abc"


def test_a_long_stop_string_costs_no_more_for_each_character() -> None:
    strings = stop_strings(("a" * 5000,))
    scan = StopScan(("a" * 5000,), include=False)
    assert scan.feed("a" * 4999, armed=True) == ""
    assert scan.feed("b", armed=True) == "a" * 4999 + "b"
    assert len(strings.next) == 5001
