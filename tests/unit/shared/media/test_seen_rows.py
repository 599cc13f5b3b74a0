"""Which rows beside a prompt a token sees, and where they lie."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from shared.ids import InstanceId, RowsName
from shared.media.seen_rows import blocks_of_rows, places_of_rows, seen_rows
from shared.messages.generation import MediaRows, PromptEmbeds


def beside(*runs: tuple[int, int], count: int | None = None) -> PromptEmbeds:
    rows = sum(each for _, each in runs) if count is None else count
    return PromptEmbeds(dtype="float16", size=2, rows=bytes(4 * rows), runs=runs, encoded=True)


@pytest.mark.parametrize(
    ("embeds", "seen", "places", "blocks"),
    [
        (beside(count=40), [(0, 0, 40)], ((0, 40),), 3),
        (beside((0, 40)), [(0, 0, 40)], ((0, 40),), 3),
        (beside((7, 16)), [(7, 0, 16)], ((0, 16),), 1),
        (beside((3, 20), (9, 5)), [(3, 0, 20), (9, 2, 5)], ((0, 20), (32, 5)), 3),
        (beside((3, 20), (4, 5)), [(3, 0, 20), (4, 0, 25)], ((0, 20), (20, 5)), 2),
        (
            beside((1, 5), (2, 5), (4, 16), (5, 1), (6, 1)),
            [(1, 0, 5), (2, 0, 10), (4, 1, 16), (5, 1, 17), (6, 1, 18)],
            ((0, 5), (5, 5), (16, 16), (32, 1), (33, 1)),
            3,
        ),
    ],
)
def test_images_without_text_between_them_are_seen_together_and_others_in_place_of_each_other(
    embeds: PromptEmbeds, seen: list[tuple[int, int, int]], places: tuple[tuple[int, int], ...], blocks: int
) -> None:
    assert embeds.fits(10)
    assert seen_rows(embeds, 16) == seen
    assert places_of_rows(embeds, 16) == places
    assert blocks_of_rows(embeds, 16) == blocks


KEPT = MediaRows(RowsName(bytes(16)), 5, InstanceId("encoder-1"))


@pytest.mark.parametrize(
    "embeds",
    [
        beside((3, 20), (3, 5)),
        beside((4, 20), (3, 5)),
        beside((3, 20), (10, 5)),
        beside((3, 20), (5, 5), count=24),
        beside((3, 20), (5, 0)),
        replace(beside((3, 5)), mutual=(True,)),
        replace(beside((3, 5)), texts=((1, (2,)),)),
        replace(beside((3, 5), count=0), media=(KEPT, KEPT)),
        replace(beside((3, 4), count=0), media=(KEPT,)),
    ],
)
def test_runs_that_no_rows_or_tokens_are_there_for_do_not_fit(embeds: PromptEmbeds) -> None:
    assert not embeds.fits(10)
    assert replace(beside((3, 5), count=0), media=(KEPT,)).fits(10)
