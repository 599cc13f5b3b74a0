"""Rows of images are kept as long as there is room, those used last the longest."""

from __future__ import annotations

from services.encoder.core.row_cache import RowCache, image_hash
from shared.messages.generation import PromptEmbeds

A, B, C = map(image_hash, (b"a", b"b", b"c"))


def rows(count: int) -> PromptEmbeds:
    return PromptEmbeds(dtype="float16", size=2, rows=bytes(4 * count))


def test_the_least_recently_used_rows_make_room() -> None:
    cache = RowCache(20)
    cache.keep(A, rows(2))
    cache.keep(B, rows(2))
    assert cache.find(A) == rows(2)
    cache.keep(C, rows(3))
    assert [cache.find(each) for each in (A, B, C)] == [rows(2), None, rows(3)]
    assert cache.bytes_used == 20


def test_what_is_kept_already_or_never_fits_changes_nothing() -> None:
    cache = RowCache(8)
    cache.keep(A, rows(1))
    cache.keep(A, rows(2))
    cache.keep(B, rows(3))
    assert (cache.find(A), cache.find(B), cache.bytes_used, len(cache)) == (rows(1), None, 4, 1)
    nothing = RowCache(0)
    nothing.keep(A, rows(1))
    assert len(nothing) == 0


def test_an_image_is_named_by_its_bytes() -> None:
    assert image_hash(b"a") == A != B
    salted = {image_hash(b"a", salt) for salt in (None, "", "alice", "bob")}
    assert len(salted) == 4
    assert len(A) == 16
