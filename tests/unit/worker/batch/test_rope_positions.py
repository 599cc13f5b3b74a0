"""Positions of three axes: the library's own of the same tokens and images."""

from __future__ import annotations

from random import Random

import numpy as np
import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from services.worker.batch.rope_positions import RopeShifts, prompt_shifts
from shared.messages.generation import ImageGrid, PromptEmbeds

MERGED = 2


class Prompt:
    """Texts and images in some order, and what the library's model says of their positions."""

    def __init__(self, random: Random) -> None:
        self.length = 0
        runs: list[tuple[int, int]] = []
        grids: list[ImageGrid | None] = []
        kinds: list[int] = []
        for _ in range(random.randint(1, 4)):
            kinds += [0] * random.randint(1, 5)
            grid = (1, random.randint(1, 4), random.randint(1, 4))
            runs.append((len(kinds), grid[1] * grid[2]))
            grids.append(grid)
            kinds += [1] * (grid[1] * grid[2])
        kinds += [0] * random.randint(0, 3)
        if random.random() < 0.5:  # rows of a client's own, whose positions are a text's
            runs.append((len(kinds), 2))
            grids.append(None)
            kinds += [0, 0, 0]
        self.length = len(kinds)
        rows = b"\0" * 2 * sum(count for _, count in runs)
        self.embeds = PromptEmbeds(dtype="float16", size=1, rows=rows, runs=tuple(runs), grids=tuple(grids))
        assert self.embeds.fits(self.length)
        model = Qwen2VLModel.__new__(Qwen2VLModel)
        torch.nn.Module.__init__(model)
        model.config = Qwen2VLConfig(vision_config={"spatial_merge_size": MERGED})
        patches = torch.tensor([[1, MERGED * grid[1], MERGED * grid[2]] for grid in grids if grid])
        positions, delta = model.get_rope_index(torch.zeros(1, self.length), torch.tensor([kinds]), patches)
        self.positions, self.delta = positions[:, 0].numpy().astype(int), int(delta)


def test_positions_are_the_librarys_wherever_a_step_begins() -> None:
    random = Random(0)
    for _ in range(40):
        prompt, shifts = Prompt(random), RopeShifts(4)
        shifts.add(2, prompt.embeds, computed := random.randrange(prompt.length))
        end = prompt.length + 5
        expected = np.concatenate(
            (prompt.positions, np.arange(prompt.length, end)[None].repeat(3, 0) + prompt.delta), 1
        )
        while computed < end:
            count = min(random.randint(1, 6), end - computed)
            places = np.arange(computed, computed + count, dtype=np.int32)
            found = shifts.of(np.full(count, 2), places)
            assert ((places if found is None else places + found) == expected[:, places]).all()
            computed += count
        assert shifts.of(np.array([1, 3]), np.array([7, 7], dtype=np.int32)) is None, "others have no image"
        shifts.release(2)
        assert shifts.of(np.array([2]), np.array([3], dtype=np.int32)) is None


def test_frames_of_a_video_count_its_time_and_text_goes_on_behind_all() -> None:
    """A video of three frames of 2 times 4, 5 positions apart, an image, and a video that is no longer than wide; as
    the model's own code has it (arXiv:2409.12191): each begins behind the greatest position before it."""
    grids: tuple[ImageGrid, ...] = (*3 * ((1, 2, 4),), (1, 1, 2), *2 * ((1, 1, 3),))
    offsets = (None, 5, 10, None, None, 1)
    runs, place = [], 2
    for count, gap in zip((8, 8, 8, 2, 3, 3), (0, 0, 3, 1, 0, 2), strict=True):
        runs.append((place, count))
        place += count + gap
    rows = bytes(2 * 32)
    embeds = PromptEmbeds(dtype="float16", size=1, rows=rows, runs=tuple(runs), grids=grids, offsets=offsets)
    assert embeds.fits(place)
    found = prompt_shifts(embeds)
    positions = found[:, :-1] + np.arange(found.shape[1] - 1)
    cell = np.indices((2, 4)).reshape(2, -1)
    first = [np.stack([np.full(8, 2 + offset), *(2 + cell)]) for offset in (0, 5, 10)]
    text = np.arange(13, 16)[None].repeat(3, 0)
    image = 16 + np.array([[0, 0], [0, 0], [0, 1]])
    pair = [20 - 1 + np.array([[t] * 3, [0] * 3, [0, 1, 2]]) for t in (0, 1)]
    expected = np.concatenate([np.array([[0, 1]] * 3), *first, text, image, [[18]] * 3, *pair], axis=1)
    assert (positions == expected).all()
    assert found[0, -1] + found.shape[1] - 1 == 22, "behind the three columns"


def test_runs_of_a_video_follow_each_other_and_its_times_are_part_of_its_name() -> None:
    def video(offset: int | None, second: int = 3) -> PromptEmbeds:
        runs, grids = ((1, 2), (second, 2)), 2 * ((1, 1, 2),)
        offsets = (None, offset) if offset is not None else ()
        return PromptEmbeds(dtype="float16", size=1, rows=bytes(8), runs=runs, grids=grids, offsets=offsets)

    assert len({video(offset).of_tokens(0, 16) for offset in (None, 0, 1, 300)}) == 4
    assert [video(1, second).fits(8) for second in (3, 4)] == [True, False]
    assert not PromptEmbeds(
        dtype="float16", size=1, rows=bytes(4), runs=((1, 2),), grids=((1, 1, 2),), offsets=(1,)
    ).fits(8), "the first run goes on with nothing"


def test_equal_rows_that_lie_otherwise_are_another_prefix() -> None:
    flat = PromptEmbeds(dtype="float16", size=1, rows=b"\0" * 8, runs=((1, 4),), grids=((1, 1, 4),))
    square = PromptEmbeds(dtype="float16", size=1, rows=b"\0" * 8, runs=((1, 4),), grids=((1, 2, 2),))
    plain = PromptEmbeds(dtype="float16", size=1, rows=b"\0" * 8, runs=((1, 4),))
    assert len({each.of_tokens(0, 16) for each in (flat, square, plain)}) == 3
    assert prompt_shifts(flat)[0, -1] == 0
    assert prompt_shifts(square)[0, -1] == -2


def test_a_prefix_that_has_seen_an_image_is_named_by_all_of_it() -> None:
    """Two images whose first 15 rows are equal: where they see each other, these are different."""
    rows = b"\0" * 40
    names = []
    for mutual in ((), (True,)):
        embeds = [
            PromptEmbeds(dtype="float16", size=1, rows=each, runs=((1, 20),), mutual=mutual)
            for each in (rows, rows[:-1] + b"\1")
        ]
        names.append([each.of_tokens(0, 16) for each in embeds])
    (causal, equal), (one, other) = names
    assert causal == equal
    assert one != other


def test_grids_are_as_large_as_their_runs() -> None:
    for grids in (((1, 2, 3),), ((1, 2, 2), None), ((2, 1, 1),)):
        wrong = PromptEmbeds(dtype="float16", size=1, rows=b"\0" * 8, runs=((1, 4),), grids=grids)
        assert not wrong.fits(6)
