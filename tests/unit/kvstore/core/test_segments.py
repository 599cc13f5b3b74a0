"""The index of the SSD tier: where blocks go, what is found, and which segment makes room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.layout import PAGE
from kvstore.core.segments import MAX_SEGMENT_BYTES, Segment, SegmentIndex
from shared.blocks import BlockHash

ONE, OTHER = "one", "other"
RECORD = 4 * PAGE


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def store(index: SegmentIndex, numbers: list[int], layout: str = ONE, record: int = RECORD) -> list[Segment]:
    """Writes blocks one by one; returns the segments that made room."""
    evicted: list[Segment] = []
    for number in numbers:
        room = index.room(layout, record)
        assert room is not None
        evicted += room.evicted
        index.written(room.segment, [name(number)])
    return evicted


def found(index: SegmentIndex, numbers: list[int], layout: str = ONE) -> int:
    return len(index.find(layout, map(name, numbers)))


def small(segments: int = 16, records: int = 3) -> SegmentIndex:
    """Room for so many segments of so many records."""
    return SegmentIndex(segments * (Segment(ONE, 0, RECORD, records).file_bytes + 128))


def test_a_leading_run_is_found_and_only_in_its_layout() -> None:
    index = small()
    store(index, [1, 2, 4])
    assert found(index, [1, 2, 3, 4]) == 2
    assert found(index, [1, 2], OTHER) == 0
    assert (index.has(ONE, name(4)), index.has(ONE, name(3)), index.blocks) == (True, False, 3)


def test_records_fill_a_segment_before_another_is_made() -> None:
    index = small(records=3)
    store(index, [1, 2, 3, 4])
    segments = [place.segment.number for place in index.find(ONE, map(name, [1, 2, 3, 4]))]
    assert segments == [1, 1, 1, 2]


def test_the_segment_that_was_not_used_for_longest_makes_room_as_a_whole() -> None:
    index = small(segments=16, records=3)
    store(index, list(range(48)))
    assert found(index, [0, 1, 2]) == 3
    [evicted] = store(index, [100])
    assert evicted.names == [name(3), name(4), name(5)]
    assert (found(index, [0]), found(index, [3])) == (1, 0)
    assert (index.evictions, index.blocks) == (3, 46)


def test_layouts_share_the_limit() -> None:
    index = small(segments=16, records=3)
    store(index, list(range(48)))
    evicted = store(index, [1], OTHER, record=7 * PAGE)
    assert {segment.layout for segment in evicted} == {ONE}
    assert index.bytes <= index.limit
    assert found(index, [1], OTHER) == 1


def test_what_does_not_fit_at_all_has_no_room() -> None:
    assert SegmentIndex(3 * RECORD).room(ONE, 4 * RECORD) is None


def test_large_tiers_have_segments_of_a_bounded_size() -> None:
    room = SegmentIndex(2**40).room(ONE, RECORD)
    assert room is not None
    assert MAX_SEGMENT_BYTES - 2 * RECORD < room.segment.file_bytes <= MAX_SEGMENT_BYTES


def test_a_block_that_turns_out_spoilt_is_not_found_and_can_be_written_again() -> None:
    index = small()
    store(index, [1, 2])
    index.drop(index.find(ONE, [name(1)])[0])
    assert found(index, [1]) == 0
    store(index, [1])
    assert found(index, [1, 2]) == 2


def test_what_was_found_at_the_start_is_filled_further_and_the_oldest_goes_where_there_is_less_room_now() -> None:
    found_files = [
        Segment(ONE, 7, RECORD, 2, [name(1), name(2)]),
        Segment(ONE, 9, RECORD, 2, [None, name(4)]),
        Segment(ONE, 8, RECORD, 2, [name(5)]),
    ]
    index = SegmentIndex(2 * found_files[0].file_bytes)
    assert index.recover(found_files) == [found_files[0]]
    assert (found(index, [4]), found(index, [5]), index.blocks) == (1, 1, 2)
    store(index, [6])
    assert index.find(ONE, [name(6)])[0].segment is found_files[2]
    room = index.room(ONE, RECORD)
    assert room is not None
    assert room.segment.number == 10


@given(st.lists(st.tuples(st.sampled_from("wfdr"), st.sampled_from([ONE, OTHER]), st.integers(0, 40))))
def test_the_limit_is_kept_and_everything_found_is_where_it_was_written(steps: list[tuple[str, str, int]]) -> None:
    index = small(segments=16, records=2)
    for kind, layout, number in steps:
        match kind:
            case "w" if not index.has(layout, name(number)):
                store(index, [number], layout, RECORD if layout == ONE else 3 * RECORD)
            case "f":
                found(index, [number], layout)
            case "d":
                for place in index.find(layout, [name(number)]):
                    index.drop(place)
            case "r" if index.segments:
                index.remove(list(index.segments.values())[number % len(index.segments)])
            case _:
                pass
        assert index.bytes <= index.limit
        for each in (ONE, OTHER):
            for place in (p for n in range(41) for p in index.find(each, [name(n)])):
                assert place.segment.names[place.record] == place.name
                assert index.segments[place.segment.number] is place.segment
