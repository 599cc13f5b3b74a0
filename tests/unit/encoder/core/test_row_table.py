"""Rows stay as long as somebody needs them, and then as long as there is room, those used last the longest."""

from __future__ import annotations

from msgspec.structs import replace

from services.encoder.core.row_table import RowTable, image_hash, rows_name
from shared.ids import InstanceId, RowsName
from shared.messages.encoder import EncodeInput
from shared.messages.generation import MediaRows, PromptEmbeds

A, B, C = (image_hash(EncodeInput(file)) for file in (b"a", b"b", b"c"))
LEASE = 10.0


def made(count: int, first: int = 0) -> tuple[RowsName, PromptEmbeds]:
    rows = PromptEmbeds(dtype="float16", size=2, rows=bytes([first]) + bytes(4 * count - 1), runs=((0, count),))
    name = rows_name(rows)
    return name, replace(rows, rows=b"", media=(MediaRows(name, count, InstanceId("encoder-1")),))


def table(max_bytes: int = 100, cache: int = 100) -> RowTable:
    return RowTable(max_bytes, cache, LEASE)


def test_what_is_needed_stays_and_what_was_used_least_recently_makes_room() -> None:
    rows = table(max_bytes=20)
    (a, of_a), (b, of_b) = made(2), made(2, first=1)
    rows.keep(a, 8, 0.0, A, of_a)
    rows.keep(b, 8, 1.0, B, of_b)
    assert rows.make_room(5, 2.0) is None, "both are leased"
    assert rows.find(A, 3.0) == (a, of_a)
    assert rows.make_room(4, 3.0) == []
    assert rows.make_room(5, 11.5) == [b]
    assert (rows.find(A, 12.0), rows.find(B, 12.0), rows.bytes_used) == ((a, of_a), None, 8)
    assert rows.make_room(13, 12.0) is None
    assert rows.renew((a, b), 21.0) == [a]
    assert rows.make_room(20, 30.0) is None
    assert rows.make_room(20, 31.0) == [a]
    assert not rows.fits(21)


def test_a_cache_holds_what_nobody_needs() -> None:
    rows = table(cache=8)
    for number, image in enumerate((A, B, C)):
        name, answer = made(2, first=number)
        rows.keep(name, 8, float(number), image, answer)
    assert rows.trim(9.0) == []
    assert rows.trim(11.0) == [made(2)[0]]
    assert (len(rows), rows.find(A, 11.0)) == (2, None)


def test_equal_rows_of_two_images_are_kept_once() -> None:
    rows = table()
    name, answer = made(1)
    rows.keep(name, 4, 0.0, A, answer)
    rows.keep(name, 4, 0.0, B, answer)
    assert (rows.bytes_used, rows.find(A, 1.0), rows.find(B, 1.0)) == (4, (name, answer), (name, answer))
    assert rows.make_room(100, 20.0) == [name]
    assert rows.find(A, 20.0) is rows.find(B, 20.0) is None


def test_what_a_former_process_left_is_found_when_it_is_made_again() -> None:
    rows = table()
    name, answer = made(1)
    rows.keep(name, 4, 0.0, None, None)
    assert rows.find(A, 0.0) is None
    rows.keep(name, 4, 1.0, A, answer)
    assert (rows.find(A, 1.0), rows.bytes_used) == ((name, answer), 4)


def test_an_image_is_named_by_its_bytes_its_size_and_whether_it_is_alone() -> None:
    assert image_hash(EncodeInput(b"a", turn="bob")) == A != B
    salted = {image_hash(EncodeInput(b"a", salt)) for salt in (None, "", "alice", "bob")}
    assert len(salted | {image_hash(EncodeInput(b"a", max_side=side)) for side in (256, 512)}) == 6
    assert image_hash(EncodeInput(b"a", several=True)) not in salted
    assert len(A) == 16


def test_images_that_are_forgotten_leave_the_rows_that_somebody_needs() -> None:
    rows = table()
    (a, of_a), (b, of_b) = made(2), made(2, first=1)
    rows.keep(a, 8, 0.0, A, of_a)
    rows.keep(b, 8, 5.0, B, of_b)
    assert rows.forget_images(12.0) == [a], "b is leased"
    assert (rows.find(A, 12.0), rows.find(B, 12.0), rows.bytes_used) == (None, None, 8)
    assert rows.renew((a, b), 12.0) == [b]
    rows.keep(b, 8, 13.0, B, of_b)
    assert rows.find(B, 14.0) == (b, of_b)
